"""The door processes: they check clients' requests and pass them on to tritonserver."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.errors import EngineError
from inflight.ipc.metrics.request_counts import SUFFIX
from inflight.supervision.service_child import ServiceChild

START_TIMEOUT_S = 30.0
_TITLES = {"http": "HTTP door", "grpc": "gRPC door", "gateway": "gateway worker"}


class DoorChild(ServiceChild):
    """A door's process.

    Args:
        kind: `http`, `grpc` or `gateway`.
        number: of several doors of a kind; 0 for the first.
        listen: host:port for the clients.
        upstream: called at each start for host:port of tritonserver.
        health_file: where the supervisor writes the server's health.
        log_file: for the door's output; appended to.
        options: further arguments.
    """

    def __init__(
        self,
        kind: str,
        *,
        listen: str,
        upstream: Callable[[], str],
        health_file: Path,
        log_file: Path,
        options: Sequence[str] = (),
        number: int = 0,
    ) -> None:
        name = f"{kind}-{number}" if number else kind
        super().__init__(
            f"the {_TITLES[kind]}{f' {number}' if number else ''}",
            f"inflight.door.{kind}_door",
            heartbeat=health_file.with_name(f"{name}.beat"),
            log_file=log_file,
            options=(
                *("--listen", listen, "--health", str(health_file)),
                *("--counts", str(health_file.with_name(name + SUFFIX)), *options),
            ),
        )
        self._listen = listen
        self._upstream = upstream

    def wait_until_it_listens(self) -> None:
        """Raises EngineError if it does not, in time."""
        host, _, port = self._listen.rpartition(":")
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                return
            problem = self.problem()
            if problem:
                raise EngineError(f"{self.name} {problem}; log: {self._log_file}")
            time.sleep(0.02)
        raise EngineError(f"{self.name} does not listen on {self._listen}; log: {self._log_file}")

    def _options_of_start(self) -> Sequence[str]:
        return ("--upstream", self._upstream())
