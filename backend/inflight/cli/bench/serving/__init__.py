"""`inflight bench serve`: a load generator for a running server."""
