"""Ends what a server leaves behind that was killed."""
