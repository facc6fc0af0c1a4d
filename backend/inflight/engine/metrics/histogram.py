"""A histogram as an array of counts."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts observations by bucket.

    Args:
        bounds: inclusive upper bounds of the buckets, ascending; a last bucket takes the rest.

    Attributes:
        counts: observations in each bucket, not cumulative.
        sum: of the observed values.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones at the cost of one."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times
