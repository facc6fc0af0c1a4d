"""Hold a two-turn chat in which the second question refers to the first answer."""

import argparse

from inflight_client import Client, Message

QUESTIONS = ["What is the capital of France?", "Which river flows through it?"]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC endpoint")
arguments = parser.parse_args()

messages: list[Message] = []
with Client(arguments.url, timeout=60.0) as client:
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = client.chat(messages, max_tokens=32, temperature=0.0)
        print(answer.text)
        messages.append({"role": "assistant", "content": answer.text})
