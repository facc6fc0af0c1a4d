"""Requests in the forms that clients of other servers send."""
