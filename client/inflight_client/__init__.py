"""A client for the wire contract of inflight ensembles."""
