"""Print the logprob of each token and of its most probable alternatives."""

import argparse

from inflight_client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC endpoint")
arguments = parser.parse_args()

with Client(arguments.url, timeout=60.0) as client:
    completion = client.generate("The capital of France is", max_tokens=4, num_logprobs=3)
for token, *others in completion.logprobs:
    alternatives = ", ".join(f"{one.text!r} {one.logprob:.2f}" for one in others)
    print(f"{token.text!r} {token.logprob:.2f} (rank {token.rank}); others: {alternatives}")
