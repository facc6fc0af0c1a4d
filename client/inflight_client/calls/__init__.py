"""Calls apart from completions, and when a call is repeated."""
