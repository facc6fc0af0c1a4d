"""Benchmarks that users run: `inflight bench`."""
