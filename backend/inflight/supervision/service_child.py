"""A child process of the server that beats and writes to its log."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from inflight.ipc.heartbeat import Lateness
from inflight.ipc.processes import how_it_exited
from inflight.sandbox.process import start_process

EXIT_S = 5.0


class ServiceChild:
    """A module run as a process; it takes `--parent` and `--heartbeat`.

    Args:
        name: in messages.
        module: of Python.
        heartbeat: the file.
        log_file: for its output; appended to.
        options: further arguments.
    """

    def __init__(
        self, name: str, module: str, *, heartbeat: Path, log_file: Path, options: Sequence[str]
    ) -> None:
        self.name = name
        self._log_file = log_file
        self._heartbeat = heartbeat
        self._lateness = Lateness()
        self._command = [
            *(sys.executable, "-m", module, "--parent", str(os.getpid())),
            *("--heartbeat", str(heartbeat), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        self._heartbeat.unlink(missing_ok=True)  # of the one before: it would look overdue
        with open(self._log_file, "ab") as output:
            self._process = start_process(
                [*self._command, *self._options_of_start()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor
            )

    def problem(self) -> str:
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            return how_it_exited(status)
        return "hangs" if self._lateness.of(self._heartbeat) else ""

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """Have it end in order; `wait_or_kill` waits for that."""
        if self._process is not None:
            self._process.terminate()

    def wait_or_kill(self) -> None:
        """Wait until it has ended; kill it if that takes too long."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
            self.kill()

    def _options_of_start(self) -> Sequence[str]:
        """Further arguments that may differ from start to start."""
        return ()


def close_all(children: Sequence[ServiceChild]) -> None:
    """End them in order, side by side; kill those that take too long."""
    for child in children:
        child.terminate()
    for child in children:
        child.wait_or_kill()
