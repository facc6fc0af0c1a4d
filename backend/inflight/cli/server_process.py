"""`inflight serve` as a child of another command, on free ports of loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from inflight.deploy.tritonserver.server import POLL_S
from inflight.errors import EngineError
from inflight.ipc import health
from inflight.ipc.health import UNKNOWN, Health
from inflight.sandbox.process import start_process

KILLED_EXIT_S = 5.0
_FREE_PORTS = [f"--{kind}-port=0" for kind in ("http", "grpc", "metrics", "engine-metrics")]
_OPTIONS = [*_FREE_PORTS, "--no-gateway"]
# The kernel ends it with the command that started it; then its janitor ends the rest.
_LAUNCHER = """\
import sys
from inflight.ipc.processes import end_with
end_with(int(sys.argv.pop(1)))
from inflight.cli.app import main
main()
"""


class ServerProcess:
    """A running `inflight serve`; leaving the `with` block kills it if it still runs.

    Args:
        arguments: further ones of `serve`.

    Raises:
        CapacityError: see `start_process`.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="inflight-")
        self._output = Path(self._folder.name, "output")
        command = [sys.executable, "-c", _LAUNCHER, str(os.getpid())]
        with open(self._output, "wb") as output:
            self._process = start_process(
                [*command, "serve", *_OPTIONS, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1", "COLUMNS": "1000"},
                start_new_session=True,  # Ctrl-C in the terminal is for the command
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def health(self) -> Health:
        return health.of_servers().get(self.pid, UNKNOWN)

    def wait_ready(
        self, timeout_s: float | None, on_poll: Callable[[Health], None] = lambda health: None
    ) -> Health:
        """The health once all models are ready.

        Args:
            timeout_s: None waits as long as the server runs.
            on_poll: called several times a second.

        Raises:
            EngineError: the server exited, with its reason, or is not ready in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (found := self.health()).is_ready:
            if self._process.poll() is not None:
                raise EngineError(self._why_it_exited())
            if deadline is not None and time.monotonic() > deadline:
                raise EngineError(f"the server is not ready within {timeout_s:g} s: {found.reason}")
            on_poll(found)
            time.sleep(POLL_S)
        return found

    def stop(self, timeout_s: float) -> int:
        """Drain and stop; returns the exit status.

        Raises:
            EngineError: it does not exit in time, and was killed.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILLED_EXIT_S)
            raise EngineError(f"the server did not stop within {timeout_s:g} s") from None

    def _why_it_exited(self) -> str:
        output = self._output.read_text(errors="replace")
        found = re.search(r"^error: (.*)", output, re.MULTILINE | re.DOTALL)
        if found:
            return found[1].strip()
        lines = output.strip().splitlines()
        return lines[-1] if lines else f"the server exited with {self._process.returncode}"
