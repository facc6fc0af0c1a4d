"""Axes: from values to places, and which values have a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_STEPS = (1.0, 2.0, 5.0, 10.0)
_MAX_TICKS = 6
# Of ticks of levels, as a share of the axis: labels take as much.
_MIN_DISTANCE = 0.08


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`.

    Attributes:
        is_log: places are by the logarithm; `low` is above 0.
        ticks: values with a tick.
    """

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """In [0, 1] for values on the axis."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(values: Iterable[float]) -> Scale:
    """From 0 to a round number that is not below any value."""
    high = max([0.0, *values]) or 1.0
    step = _round_up(high / _MAX_TICKS)
    count = math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(count + 1))
    return Scale(0.0, ticks[-1], False, ticks)


def logarithmic(values: Sequence[float]) -> Scale:
    """Around all values, which are above 0; ticks at 1, 2 and 5 times powers of 10."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**power * step for power in powers for step in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > _MAX_TICKS:
        inside = [tick for tick in inside if math.log10(tick).is_integer()] or inside
    return Scale(low, high, True, tuple(inside))


def levels(values: Sequence[float]) -> Scale:
    """For levels of load: a tick at each, unless it is close to the one before; by logarithm if
    they span a factor of 8."""
    low, high = min(values), max(values)
    is_log = high >= 8 * low
    found = Scale(low if is_log else 0.0, high, is_log, ())
    ticks = [found.low]
    for value in sorted(values):
        if found.place(value) - found.place(ticks[-1]) >= _MIN_DISTANCE:
            ticks.append(value)
    return replace(found, ticks=tuple(ticks))


def _round_up(value: float) -> float:
    """To 1, 2, 5 or 10 times a power of 10."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _STEPS if step * power >= value * (1 - 1e-9))
