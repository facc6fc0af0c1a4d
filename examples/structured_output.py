"""Request output that matches a JSON schema, and parse it."""

import argparse
import json

from inflight_client import Client

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "medium", "large"]},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC endpoint")
arguments = parser.parse_args()

with Client(arguments.url, timeout=60.0) as client:
    answer = client.chat(
        [{"role": "user", "content": "Name a city in France and its size, as JSON."}],
        max_tokens=64,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=SCHEMA,
    )
# An output that reaches max_tokens ends early and may be incomplete.
if answer.finish_reason != "stop":
    raise SystemExit(f"incomplete: {answer.text}")
city = json.loads(answer.text)
print(f"{city['city']} is {city['size']}")
