"""A mirror of the Hugging Face hub that has one model, for HF_ENDPOINT."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The mirror.

    Attributes:
        model: the name of its only model, with the one revision `main`.
        folder: the model's files.
        url: of the mirror.
        cut: of a file, how many bytes of it are sent before its connection is lost, once.
        gets: (file, value of the header Range) of each download.
        status: of all answers, if not 200.
    """

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.url = ""
        self.cut: dict[str, int] = {}
        self.gets: list[tuple[str, str | None]] = []
        self.status = 0

    @property
    def files(self) -> dict[str, Path]:
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path for path in found}

    def entries(self) -> list[dict[str, Any]]:
        """As the route `tree` shows them."""
        return [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": _oid(path)}
            for name, path in self.files.items()
        ]


@contextlib.contextmanager
def serve(model: str, folder: Path) -> Iterator[Hub]:
    hub = Hub(model, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            resolve = re.fullmatch(rf"/{re.escape(model)}/resolve/({COMMIT}|main)/(.+)", path)
            if hub.status:
                self._json({"error": "no"}, hub.status)
            elif resolve and resolve[2] in hub.files:
                self._file(resolve[2], with_body)
            elif path in (f"/api/models/{model}", f"/api/models/{model}/revision/main"):
                siblings = [{"rfilename": name} for name in hub.files]
                self._json({"id": model, "sha": COMMIT, "siblings": siblings})
            elif path == f"/api/models/{model}/tree/{COMMIT}":
                self._json(hub.entries())
            elif path.startswith(f"/api/models/{model}/"):
                self._json({"error": "Invalid rev id"}, 404, "RevisionNotFound")
            else:
                self._json({"error": "Repository not found"}, 404, "RepoNotFound")

        def _json(self, body: Any, status: int = 200, code: str = "") -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def _file(self, name: str, with_body: bool) -> None:
            data = hub.files[name].read_bytes()
            wanted = self.headers.get("Range")
            begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_oid(hub.files[name])}"')
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            if not with_body:
                return
            hub.gets.append((name, wanted))
            cut = hub.cut.pop(name, None)
            self.wfile.write(data[begin:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
