"""Open loops on the engine in this process: `inflight bench engine --poisson`."""
