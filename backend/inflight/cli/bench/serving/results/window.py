"""Which requests of an open loop are measured: those that are due while the load is steady.

A level begins with an empty server, so its first requests are too fast, and if arrivals ended with
the last measured request, the last ones would be, too. Arrivals therefore begin before the window
and go on after it, until the measured requests have ended; those before and after are load only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inflight.cli.bench.serving.results.records import Record


@dataclass(frozen=True, slots=True)
class Window:
    """In seconds from the start of the level; requests due in [from_s, until_s) are measured."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        return self.until_s - self.from_s

    def has(self, due_s: float) -> bool:
        return self.from_s <= due_s < self.until_s


def window(
    arrivals: Iterator[float], ramp_s: float, num_requests: int | None, duration_s: float | None
) -> Window:
    """The window of an open loop.

    Args:
        arrivals: its times, in order; consumed up to the window's end.
        ramp_s: where the window begins.
        num_requests, duration_s: where it ends, whichever comes first; at least one is given. With
            the former it ends when the next request is due, so that the rate is not biased.
    """
    until_s = None if duration_s is None else ramp_s + duration_s
    count = 0
    for due_s in arrivals:
        if until_s is not None and due_s >= until_s:
            break
        if due_s < ramp_s:
            continue
        if count == num_requests:
            until_s = due_s
            break
        count += 1
    assert until_s is not None
    return Window(ramp_s, until_s)


class CoolDown:
    """The time after the window, until the measured requests have ended or are given up.

    Args:
        records: the measured requests.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._open = list(records)

    def is_over(self, now: float) -> bool:
        """
        Args:
            now: `time.perf_counter()`.
        """
        self._open = [one for one in self._open if not one.ended and now < one.give_up]
        return not self._open
