"""How fast the queue drains, for the hint of a refusal when to try again."""

from __future__ import annotations

import math
from collections import deque

MIN_RETRY_S = 1
# Clients with a bounded patience give up rather than wait longer.
MAX_RETRY_S = 60
_NUM_MEASURED = 64


class DrainRate:
    """Admissions from the queue over time, of the last few since it was last empty.

    All times are in seconds of one clock.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_NUM_MEASURED)

    def restart(self) -> None:
        """The queue is empty: how long it stays so says nothing about the rate."""
        self._times.clear()

    def admitted(self, count: int, now: float) -> None:
        """So many requests have left the queue for their first step."""
        self._times.extend([now] * count)

    def seconds_for(self, num_requests: int, now: float) -> int:
        """Estimate of when so many more will have been admitted: whole seconds, from MIN_RETRY_S to
        MAX_RETRY_S; the least if nothing is measured yet."""
        if not self._times:
            return MIN_RETRY_S
        seconds = num_requests * (now - self._times[0]) / len(self._times)
        return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(seconds)))
