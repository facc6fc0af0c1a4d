"""What an engine counts and measures: the table of families, the recorder, snapshots."""
