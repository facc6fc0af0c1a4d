"""Searches the highest rate that meets the SLO."""

from __future__ import annotations

import math

TOLERANCE = 0.05
"""The search ends when the lowest rate that fails is at most so much above the highest that does
not: windows of a minute differ by as much."""
MAX_DOUBLINGS = 6
"""Of the first rate, or halvings: the highest rate is at most so far away from it."""


class RateSearch:
    """Doubles or halves the rate until one meets the SLO and one does not, then bisects between
    them on a logarithmic scale.

    Args:
        first: rate to begin with, above 0.

    Attributes:
        met: the highest rate that met the SLO; None so far.
        missed: the lowest rate that did not; None so far.
    """

    def __init__(self, first: float) -> None:
        self.met: float | None = None
        self.missed: float | None = None
        self._first = first
        self._num_tried = 0

    def next(self) -> float | None:
        """The rate to try next; None at the end of the search."""
        if self.met is None and self.missed is None:
            return _rounded(self._first)
        if self.met is None or self.missed is None:
            if self._num_tried > MAX_DOUBLINGS:
                return None
            return _rounded(self.met * 2 if self.met is not None else (self.missed or 0.0) / 2)
        middle = _rounded(math.sqrt(self.met * self.missed))
        if self.missed <= self.met * (1 + TOLERANCE) or not self.met < middle < self.missed:
            return None
        return middle

    def tried(self, rate: float, is_met: bool) -> None:
        """The result of the rate that `next` returned."""
        self._num_tried += 1
        if is_met:
            self.met = rate
        else:
            self.missed = rate


def _rounded(rate: float) -> float:
    """To three digits, as rates are shown."""
    return float(f"{rate:.3g}")
