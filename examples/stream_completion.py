"""Stream a completion and print it as it is generated."""

import argparse

from inflight_client import Client

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC endpoint")
parser.add_argument("prompt", nargs="?", default="The capital of France is")
arguments = parser.parse_args()

with (
    Client(arguments.url, timeout=60.0) as client,
    client.stream(arguments.prompt, max_tokens=24, temperature=0.0) as stream,
):
    for delta in stream:
        print(delta.text, end="", flush=True)
        if delta.finish_reason:
            print(f"\n[{delta.finish_reason}]")
