"""Sandboxes for several threads: jobs run side by side, up to a number of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from inflight.errors import EngineError
from inflight.sandbox.process import SandboxLost, SandboxProcess


class SandboxPool:
    """As many sandboxes as there are jobs at a time, at most `size`; kept for later jobs.

    Args:
        make: a sandbox, not started.
        size: further jobs wait.
    """

    def __init__(self, make: Callable[[], SandboxProcess], size: int = 4) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._all: list[SandboxProcess] = []
        self._idle: list[SandboxProcess] = []
        self._turns = threading.BoundedSemaphore(size)

    @property
    def pids(self) -> list[int]:
        """Of the sandboxes that run."""
        with self._lock:
            return [sandbox.pid for sandbox in self._all if sandbox.pid is not None]

    def warm(self) -> None:
        """Start one sandbox now, instead of with the first job.

        Raises:
            EngineError: it does not start.
        """
        with self._turns:
            sandbox = self._take()
            try:
                sandbox.start()
            finally:
                self._give_back(sandbox)

    def run(self, job: bytes) -> bytes:
        """Run a job in a sandbox.

        Raises:
            LimitExceeded: it crossed a limit.
            EngineError: no sandbox starts, or two were lost.
        """
        with self._turns:
            sandbox = self._take()
            try:
                for _ in range(2):
                    try:
                        return sandbox.run(job)
                    except SandboxLost:
                        # It survives any job by design, so something else killed it: retry once.
                        continue
            finally:
                self._give_back(sandbox)
        raise EngineError("a sandbox died twice; retry later")

    def close(self) -> None:
        """Kill all sandboxes; a later job starts another one."""
        with self._lock:
            sandboxes, self._all, self._idle = self._all, [], []
        for sandbox in sandboxes:
            sandbox.close()

    def _take(self) -> SandboxProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            sandbox = self._make()
            self._all.append(sandbox)
            return sandbox

    def _give_back(self, sandbox: SandboxProcess) -> None:
        with self._lock:
            if sandbox in self._all:
                self._idle.append(sandbox)
                return
        sandbox.close()  # the pool was closed meanwhile
