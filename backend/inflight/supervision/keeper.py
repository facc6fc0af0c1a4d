"""Keeps a child process running: replaces it when it has exited or hangs, with back-off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from inflight.errors import InflightError

logger = logging.getLogger("inflight.supervisor")

# The first failure is repaired at once; a child that fails at each start costs little.
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A child that served so long before it failed is not failing in a row.
STABLE_S = 5.0
# So many failures in a row need an operator.
MAX_FAILURES = 5


class Child(Protocol):
    """A process that can be started again.

    Attributes:
        name: in messages.
    """

    name: str

    @property
    def pid(self) -> int:
        """Of the process that was started last; 0 before the first start."""

    def start(self) -> None:
        """Start it; returns immediately. Raises InflightError if it cannot."""

    def problem(self) -> str:
        """Why it has to be replaced; empty if it works."""

    def kill(self) -> None:
        """End it and what belongs to it, immediately."""


class Keeper:
    """Starts a child and replaces it.

    Args:
        child: the process.
        clock: seconds, monotonic.

    Attributes:
        num_restarts: how often it was started again.
        problem: the last one; empty if there was none since it last recovered.
    """

    def __init__(self, child: Child, clock: Callable[[], float] = time.monotonic) -> None:
        self.child = child
        self.num_restarts = 0
        self.problem = ""
        self._clock = clock
        self._num_failures = 0  # in a row
        self._served_since: float | None = None
        self._restart_at: float | None = None

    @property
    def is_failing(self) -> bool:
        """Whether it keeps failing, so that an operator is needed."""
        return self._num_failures >= MAX_FAILURES

    @property
    def is_down(self) -> bool:
        """Whether it has failed and waits for its restart."""
        return self._restart_at is not None

    def start(self) -> None:
        """Start it for the first time. Raises InflightError if that fails."""
        self.child.start()

    def poll(self) -> None:
        """Replace the child if it has a problem and the pause is over; call it often."""
        if self._restart_at is not None:
            if self._clock() >= self._restart_at:
                self._restart()
            return
        problem = self.child.problem()
        if problem:
            self._fail(problem)
            self.poll()  # the first restart is due at once

    def serves(self) -> None:
        """Note that the child serves; resets its back-off after a while."""
        if self.is_down:
            return
        now = self._clock()
        if self._served_since is None:
            self._served_since = now
        if self.problem:
            logger.warning("%s serves again", self.child.name)
            self.problem = ""
        if now - self._served_since > STABLE_S:
            self._num_failures = 0

    def stop(self) -> None:
        """End the child for good."""
        self._restart_at = float("inf")
        self.child.kill()

    def _restart(self) -> None:
        self._restart_at = None
        self.num_restarts += 1
        try:
            self.child.start()
        except InflightError as error:
            self._fail(f"cannot be started: {error}")

    def _fail(self, problem: str) -> None:
        pause = PAUSES_S[min(self._num_failures, len(PAUSES_S) - 1)]
        self._num_failures += 1
        self._served_since = None
        self.problem = problem
        when = f"in {pause:.0f} s" if pause else "now"
        logger.error("%s %s; starting it again %s", self.child.name, problem, when)
        self.child.kill()
        self._restart_at = self._clock() + pause
