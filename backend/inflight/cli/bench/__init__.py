"""Benchmarks for users: `inflight bench`."""
