"""The HTTP door as a process, in front of a scripted Triton."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

import lasting_health
from inflight.deploy.ports import HeldPorts
from inflight.ipc.health import Health
from waiting import PATIENCE_S, wait_until

# A pause of a client under test exceeds none of these times.
LIMITS = {
    "max_body_bytes": 1 << 20,
    "header_timeout_s": 90.0,
    "body_timeout_s": 90.0,
    "write_timeout_s": 90.0,
    "idle_timeout_s": 90.0,
    "max_connections": 60,
}
# For the tests of the times themselves.
IMPATIENT = {
    **LIMITS,
    "header_timeout_s": 1.0,
    "body_timeout_s": 1.5,
    "write_timeout_s": 1.0,
    "idle_timeout_s": 3.0,
}
INPUTS = {
    "text_input": "STRING",
    "max_tokens": "INT32",
    "seed": "UINT64",
    "temperature": "FP32",
    "stream": "BOOL",
    "stop_words": "STRING",
}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
EVENT = b'data: {"text_output":"a"}\n\n'


# The door adds it to each request, and nothing else.
TICKET = re.compile(rb',"inflight_ticket":"([0-9a-f]{16})"')


class FakeTriton(ThreadingHTTPServer):
    """Serves models named after what they do.

    Attributes:
        bodies: (path, body) of each request, bodies without their tickets.
        tickets: of these requests.
        num_lost: connections that were closed before their responses were complete.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.bodies: list[tuple[str, bytes]] = []
        self.tickets: list[str] = []
        self.num_lost = 0


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeTriton

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def begin_chunks(self, status: int = 200, kind: str = "text/event-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.bodies.append((self.path, b""))
        if self.path.startswith("/v2/models/odd_config"):
            self.answer(200, b"[1")
        elif self.path.startswith("/v2/models/mute_config"):
            self.model_slow(b"")
        elif self.path.startswith("/v2/models/unknown"):
            self.answer(404, {"error": "Request for unknown model: 'unknown' is not found"})
        elif self.path.endswith("/config"):
            declared = [{"name": n, "data_type": f"TYPE_{t}"} for n, t in INPUTS.items()]
            self.answer(200, {"input": declared})
        else:
            self.answer(200, {"name": "triton"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tickets += [ticket.decode() for ticket in TICKET.findall(body)]
        body = TICKET.sub(b"", body)
        self.server.bodies.append((self.path, body))
        model = self.path.split("/")[3]
        getattr(self, f"model_{model}", self.model_echo)(body)

    def model_echo(self, body: bytes) -> None:
        self.answer(200, body, "application/json")

    def model_stream(self, body: bytes) -> None:
        self.begin_chunks()
        for _ in range(3):
            self.chunk(EVENT)
        self.chunk(b"")

    def model_slow(self, body: bytes) -> None:
        """Nothing until the peer has left."""
        if not self.connection.recv(1):
            self.server.num_lost += 1
        self.close_connection = True

    def model_endless(self, body: bytes) -> None:
        self.begin_chunks()
        try:
            while True:
                self.chunk(EVENT * 1000 if b"wide" in body else EVENT)
                time.sleep(0.002)
        except OSError:
            self.server.num_lost += 1
            self.close_connection = True

    def model_drop(self, body: bytes) -> None:
        self.close_connection = True

    def model_half(self, body: bytes) -> None:
        self.begin_chunks(kind="application/json" if b"json" in body else "text/event-stream")
        self.chunk(EVENT)
        self.close_connection = True

    def raw(self, *parts: bytes) -> None:
        """Write these bytes as the response, and end the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            for part in parts:
                self.wfile.write(part)

    def model_garbage(self, body: bytes) -> None:
        self.raw(bytes(range(256)) * 8)

    def model_strange(self, body: bytes) -> None:
        """A status that does not exist."""
        self.raw(b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n")

    def model_cut_head(self, body: bytes) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Ty")

    def model_endless_head(self, body: bytes) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\n", *(b"x-%d: %s\r\n" % (i, b"y" * 9000) for i in range(4000)))

    def model_short(self, body: bytes) -> None:
        """A body shorter than its length."""
        self.raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )

    def model_bad_chunk(self, body: bytes) -> None:
        """One event, and then no chunk."""
        self.begin_chunks()
        self.chunk(EVENT)
        self.raw(b"this is no chunk\r\n")

    def model_reset(self, body: bytes) -> None:
        self.begin_chunks()
        self.chunk(EVENT)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close_connection = True

    def model_stalled(self, body: bytes) -> None:
        """One event, and nothing more until the peer has left."""
        self.begin_chunks(kind="application/json" if b"json" in body else "text/event-stream")
        self.chunk(EVENT)
        self.model_slow(body)

    def model_blamed(self, body: bytes) -> None:
        self.answer(500, {"error": json.loads(body)["text_input"]})


@dataclass
class Running:
    """A door, and the Triton behind it."""

    triton: FakeTriton
    process: subprocess.Popen[str]
    port: int
    health: Path
    is_ready: bool = True
    is_live: bool = True
    reason: str = ""
    models: list[str] = field(default_factory=list)
    versions: dict[str, list[int]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, *, is_ready: bool, is_live: bool = True, reason: str = "") -> None:
        self.is_ready, self.is_live, self.reason = is_ready, is_live, reason
        self.write()
        time.sleep(0.15)  # the door reads it ten times a second

    def write(self) -> None:
        """Write the health file."""
        found = Health(
            is_live=self.is_live,
            is_ready=self.is_ready,
            reason=self.reason,
            models=self.models,
            versions=self.versions,
        )
        lasting_health.write(self.health, found)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def raw(self, request: bytes) -> bytes:
        """All that comes back until the door closes the connection."""
        with self.connect() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(request)
            return receive(sock)

    def answer(self, request: bytes, number: int = 1) -> bytes:
        """So many answers, or what there is of them when the door closes the connection."""
        with self.connect() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(request)
            return receive(sock, number, has_body=not request.startswith(b"HEAD "))

    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


_LENGTH = re.compile(rb"^content-length: (\d+)", re.IGNORECASE | re.MULTILINE)


def receive(sock: socket.socket, number: int | None = None, *, has_body: bool = True) -> bytes:
    """What comes until the peer closes the connection, or until `number` answers are complete.

    Raises:
        TimeoutError: neither happens in time.
    """
    found = b""
    with contextlib.suppress(ConnectionError):
        while number is None or num_answers(found, has_body) < number:
            data = sock.recv(1 << 16)
            if not data:
                break
            found += data
    return found


def num_answers(found: bytes, has_body: bool = True) -> int:
    """Complete answers with a Content-Length at the beginning."""
    number = 0
    while (end := found.find(b"\r\n\r\n")) >= 0:
        length = _LENGTH.search(found[: end + 2])
        size = end + 4 + (int(length[1]) if length is not None and has_body else 0)
        if length is None or len(found) < size:
            break
        number, found = number + 1, found[size:]
    return number


def is_listening(door: Running) -> bool:
    """Whether it answers a probe, and has closed the probe's connection: that does not count as an
    open one. A door with TLS only closes it."""
    with contextlib.suppress(OSError):
        door.raw(head("Connection: close", start=GET.format("/v2/health/live")))
        return True
    return False


@contextlib.contextmanager
def a_door(
    folder: Path, *options: str, limits: dict[str, Any] = LIMITS, prefix: Sequence[str] = ()
) -> Iterator[Running]:
    """prefix: of its command, such as `prlimit`."""
    triton = FakeTriton()
    threading.Thread(target=triton.serve_forever, args=(0.05,), daemon=True).start()
    held = HeldPorts("127.0.0.1", (0,))
    port = held.numbers[0]
    health = folder / "health.json"
    lasting_health.write(health, Health(is_live=True, is_ready=True))
    process = subprocess.Popen(
        [
            *(*prefix, sys.executable, "-m", "inflight.door.http_door"),
            *("--listen", f"127.0.0.1:{port}", "--health", str(health)),
            *("--upstream", f"127.0.0.1:{triton.server_address[1]}"),
            *("--limits", json.dumps(limits)),
            *(option.format(triton=triton.server_address[1]) for option in options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Running(triton, process, port, health)
    try:
        wait_until(lambda: process.poll() is not None or is_listening(running))
        yield running
    finally:
        process.kill()
        process.wait()
        held.release()
        assert process.stdout is not None
        process.stdout.close()
        triton.shutdown()
        triton.server_close()


def ask(
    door: Running, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE_S)
    try:
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            method, path, payload, {k.replace("_", "-"): v for k, v in headers.items()}
        )
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, response.read()
    finally:
        connection.close()


def post(door: Running, body: Any, route: str = "echo/generate", **headers: str) -> tuple[int, str]:
    status, _, reply = ask(door, "POST", f"/v2/models/{route}", body, **headers)
    return status, reply.decode()


GENERATE = "POST /v2/models/echo/generate HTTP/1.1\r\nHost: x\r\n"


def head(*lines: str, start: str = GENERATE) -> bytes:
    return (start + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode("latin-1")


def sized(body: bytes, *lines: str) -> bytes:
    return head(f"Content-Length: {len(body)}", *lines) + body


BODY = b'{"text_input": "x"}'
GET = "GET {} HTTP/1.1\r\nHost: x\r\n"
