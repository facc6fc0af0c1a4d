"""A program that looks like tritonserver from outside, and an installation around it."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import http.server, json, os, signal, socket, sys, time

flags = dict(item[2:].partition("=")[::2] for item in sys.argv[1:])
print("arguments", json.dumps(sys.argv[1:]), flush=True)
print("pid", os.getpid(), "session", os.getsid(0), flush=True)
for line in {lines!r}:
    print(line, flush=True)
if {status!r} is not None:
    sys.exit({status!r})
if {stubborn!r}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if {hanging_stub!r}:
    import subprocess

    stub = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {region!r}])
    print("stub", stub.pid, flush=True)
    if {ends_stub!r}:
        signal.signal(signal.SIGTERM, lambda *_: (stub.kill(), stub.wait()))


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b"")

    def do_POST(self):
        self.answer(b'[{{"name": "llm"}}, {{"name": "chat"}}]')

    def log_message(self, *args):
        pass


address = (flags["http-address"], int(flags["http-port"]))
http.server.HTTPServer(address, Handler).serve_forever()
"""


def install(
    root: Path,
    *,
    lines: tuple[str, ...] = (),
    status: int | None = None,
    stubborn: bool = False,
    hanging_stub: bool = False,
    ends_stub: bool = False,
    region: str = "",
) -> Path:
    """Lay out an installation under `root`; the path of its server.

    Args:
        lines: what the server prints at its start.
        status: it exits with this at once; None to serve.
        stubborn: it does not end at SIGTERM, as tritonserver with an idle stream open.
        hanging_stub: it has a child that does not notice when it ends.
        ends_stub: at SIGTERM it ends that child and goes on, as tritonserver for up to a second.
        region: an argument of that child.
    """
    server = root / "bin" / "tritonserver"
    backend = root / "backends" / "python"
    server.parent.mkdir(parents=True)
    backend.mkdir(parents=True)
    server.write_text(
        _PROGRAM.format(
            python=sys.executable,
            lines=lines,
            status=status,
            stubborn=stubborn,
            hanging_stub=hanging_stub,
            ends_stub=ends_stub,
            region=region,
        )
    )
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).write_text(name)
    (backend / "triton_python_backend_stub").write_text("stub")
    return server
