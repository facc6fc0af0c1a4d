"""Complete several prompts concurrently, and print each completion when it is finished."""

import argparse
import asyncio

from inflight_client import AsyncClient, ClientError

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is"]


async def main(url: str, prompts: list[str]) -> None:
    async with AsyncClient(url, timeout=60.0) as client:

        async def complete(prompt: str) -> None:
            try:
                completion = await client.generate(prompt, max_tokens=8, temperature=0.0)
            except ClientError as error:
                print(f"{prompt!r}: {error}")
            else:
                print(f"{prompt!r}: {completion.text!r}, {completion.num_output_tokens} tokens")

        await asyncio.gather(*map(complete, prompts))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC endpoint")
parser.add_argument("prompts", nargs="*", default=PROMPTS)
arguments = parser.parse_args()
asyncio.run(main(arguments.url, arguments.prompts))
