"""`inflight serve`: runs a server in the foreground, shows its state and handles signals."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from inflight.deploy.tritonserver import (
    DEFAULT_DRAIN_S,
    DEFAULT_HOST,
    DEFAULT_PORTS,
    POLL_S,
    Server,
)


def run(
    repositories: Sequence[Path],
    *,
    host: str = DEFAULT_HOST,
    ports: tuple[int, int, int] = DEFAULT_PORTS,
    log_file: Path | None = None,
    drain_s: float = DEFAULT_DRAIN_S,
    verbose: bool = False,
) -> int:
    """Serve until Ctrl-C or SIGTERM, which drain; a second one stops immediately.

    Returns:
        The exit status: 0 after a requested stop, 1 if tritonserver exited by itself.
    """
    server = Server(repositories, host=host, ports=ports, log_file=log_file, drain_s=drain_s)
    with _Signals() as signals:
        server.start()
        follower = _Follower(server.log_file) if verbose else None
        try:
            return _serve(server, signals)
        finally:
            server.kill()
            if follower is not None:
                follower.close()


def _serve(server: Server, signals: _Signals) -> int:
    from inflight.cli.display import Display

    display = Display()
    with display.loading() as on_progress:
        models = server.wait_ready(on_progress=on_progress)
    signals.count_only()
    endpoints = server.endpoints
    display.ready(
        endpoints.http,
        endpoints.grpc,
        endpoints.metrics,
        models,
        server.devices(),
        server.log_file,
    )
    while signals.count == 0:
        if server.wait(POLL_S) is not None:
            display.error(f"{server.how_it_ended()} unexpectedly; log: {server.log_file}")
            return 1
    signals.raise_on_next()
    display.stopping()
    try:
        num_cut = server.stop(display.waiting)
    except KeyboardInterrupt:
        display.stopped_at_once()
    else:
        display.stopped(num_cut)
    return 0


class _Signals:
    """Counts SIGINT and SIGTERM; raises before the server is ready, and from the second one on."""

    def __init__(self) -> None:
        self.count = 0
        self._raise = True
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def count_only(self) -> None:
        self._raise = False

    def raise_on_next(self) -> None:
        self._raise = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._raise:
            raise KeyboardInterrupt


class _Follower:
    """Prints a file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        with open(self._path, errors="replace") as file:
            while True:
                ended = self._done.wait(POLL_S)
                sys.stderr.write(file.read())
                sys.stderr.flush()
                if ended:
                    return
