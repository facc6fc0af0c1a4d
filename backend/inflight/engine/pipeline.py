"""The steps of an engine in flight, with detection of persistent failures."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inflight.core.batch import Batch, StepOutput
from inflight.engine.step_times import StepTimes
from inflight.execution.runner import PendingStep, Runner

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 8
"""Consecutive failed steps that indicate a lost GPU rather than a bad request."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight.

    Attributes:
        batch: its batch.
        pending: its future result.
        time: of its launch, in seconds.
    """

    batch: Batch
    pending: PendingStep
    time: float


class StepPipeline:
    """Launches steps on a runner and takes their results, oldest first.

    Args:
        runner: computes batches.
        clock: seconds, monotonic.
        on_launch: called before each launch with the seconds within which the next result should
            be there.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float],
        on_launch: Callable[[float], None] | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._on_launch = on_launch
        self._times = StepTimes()
        self._launched: deque[Launched] = deque()
        self._consecutive_failures = 0
        self._last_result = 0.0  # time of the last processed result

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._launched)

    @property
    def is_broken(self) -> bool:
        """Whether steps fail regardless of their content, as after a GPU error."""
        return self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES

    def launch(self, batch: Batch) -> bool:
        """Launch a batch. Returns whether that succeeded."""
        now = self._clock()
        if self._on_launch is not None:
            batches = [batch, *(launched.batch for launched in self._launched)]
            self._on_launch(sum(self._times.bound_s(one.num_tokens) for one in batches))
        try:
            pending = self._runner.launch(batch)
        except Exception:  # any error fails these requests and is logged with its traceback
            self._record_failure(batch)
            return False
        self._launched.append(Launched(batch, pending, now))
        return True

    def launch_copies(self, batch: Batch) -> bool:
        """Launch a batch without chunks, which has no result. Returns whether that succeeded."""
        try:
            self._runner.launch(batch)
        except Exception:  # as in launch
            self._record_failure(batch)
            return False
        return True

    def is_due(self, has_launched: bool) -> bool:
        """Whether the oldest result is due: the runner works no further ahead, or there was nothing
        to launch."""
        return len(self._launched) > (self._runner.steps_ahead if has_launched else 0)

    def take(self) -> tuple[Launched, StepOutput | None]:
        """Wait for the oldest step. Returns it with its output, or None if it failed."""
        launched = self._launched.popleft()
        try:
            output = launched.pending.result()
        except Exception:  # as in launch
            self._record_failure(launched.batch)
            return launched, None
        self._consecutive_failures = 0
        return launched, output

    def end_of(self, launched: Launched) -> tuple[float, float]:
        """Record a processed step; returns the current time and the step's duration, in seconds."""
        now = self._clock()
        # With two steps in flight, the second starts when the first ends.
        duration = now - max(launched.time, self._last_result)
        self._last_result = now
        if self._on_launch is not None:
            self._times.record(launched.batch.num_tokens, duration)
        return now, duration

    def _record_failure(self, batch: Batch) -> None:
        """Count and log a failed step; must be called in an exception handler."""
        logger.exception("the step of %d sequences failed", len(batch.chunks))
        self._consecutive_failures += 1
