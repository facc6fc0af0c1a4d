"""The door processes: they check clients' requests and pass them on to tritonserver."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.errors import EngineError
from inflight.ipc.heartbeat import overdue_s
from inflight.ipc.processes import how_it_exited
from inflight.ipc.request_counts import SUFFIX

START_TIMEOUT_S = 30.0
EXIT_S = 5.0


class DoorChild:
    """A door's process.

    Args:
        kind: `http` or `grpc`.
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
    ) -> None:
        self.name = f"the {'HTTP' if kind == 'http' else 'gRPC'} door"
        self._listen = listen
        self._log_file = log_file
        self._upstream = upstream
        self._heartbeat = health_file.with_name(f"{kind}.beat")
        self._command = [
            *(sys.executable, "-m", f"inflight.door.{kind}_door"),
            *("--listen", listen, "--health", str(health_file), "--parent", str(os.getpid())),
            *("--heartbeat", str(self._heartbeat)),
            *("--counts", str(health_file.with_name(kind + SUFFIX)), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        self._heartbeat.unlink(missing_ok=True)  # of the one before: it would look overdue
        with open(self._log_file, "ab") as output:
            self._process = subprocess.Popen(
                [*self._command, "--upstream", self._upstream()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor
            )

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

    def problem(self) -> str:
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            return how_it_exited(status)
        return "hangs" if overdue_s(self._heartbeat) else ""

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it in order; kill it if that takes too long."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
            self.kill()
