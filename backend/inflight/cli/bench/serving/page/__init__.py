"""The report as a page of HTML that needs no other file."""
