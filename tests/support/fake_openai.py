"""A scripted server of OpenAI's API in this process, for tests of its clients."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], Iterator[bytes]]
"""From the body of a request to the parts of the body of its answer."""


def event(found: object) -> bytes:
    return b"data: " + (found if isinstance(found, bytes) else json.dumps(found).encode()) + b"\n\n"


DONE = event(b"[DONE]")


class FakeOpenAI:
    """
    Attributes:
        url: of the API, without `/v1`.
        script: of the answers.
        status: of the answers.
        requests: (path, headers, body) of all of them.
    """

    def __init__(self, script: Script) -> None:
        self.url = ""
        self.script = script
        self.status = 200
        self.models = ["fake-1", "fake-2"]
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []


@contextlib.contextmanager
def serve(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # parts arrive when they are written

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": name} for name in fake.models]}).encode()
            fake.requests.append((self.path, dict(self.headers), {}))
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append((self.path, dict(self.headers), body))
            self.send_response(fake.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError):
                for part in fake.script(body):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    fake.url = f"http{'s' * (tls is not None)}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
