"""Weighted fair queueing by token counts.

Virtual token counters (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
Each party has a counter of the tokens that it was served, divided by its weight, and the one with
the least is served next. So while two of them wait, their counters never differ by more than the
largest service.

To be idle gathers no credit: a party that begins to wait starts at least at the least counter of
those that wait, or, if nobody does, at that of the last one that did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_IDLE = 4096
"""Counters kept of parties that do not wait. The one that stopped waiting first is forgotten, and
its lead with it: names may be chosen by clients, so that there is no end of them."""


class VirtualCounters:
    """Counters of named parties.

    Args:
        weights: their relative shares; 1 for those that are not named.
    """

    def __init__(self, weights: Mapping[Any, int] | None = None) -> None:
        self._weights = weights or {}
        self._waiting: dict[str, float] = {}  # counters, first come first
        self._idle: dict[str, float] = {}  # of the others, the first to be forgotten first
        self._last = ""  # the last that stopped waiting, and its counter
        self._floor = 0.0

    def enter(self, name: str) -> None:
        """A party waits from now on; does nothing if it does already."""
        if name not in self._waiting:
            least = min(self._waiting.values(), default=self._floor)
            self._waiting[name] = max(least, self._idle.pop(name, least))

    def leave(self, name: str) -> None:
        """A party that waits no longer does."""
        self._last, self._floor = name, self._waiting.pop(name)
        self._set_idle(name, self._floor)

    def charge(self, name: str, num_tokens: int) -> None:
        """A party was served so many tokens, whether it waits for more or not."""
        tokens = num_tokens / self._weights.get(name, 1)
        if name in self._waiting:
            self._waiting[name] += tokens
            return
        counter = self._idle.pop(name, self._floor) + tokens
        if name == self._last:
            self._floor = counter
        self._set_idle(name, counter)

    def least(self) -> str:
        """Of those that wait, the one to be served next; of equal ones the first that came."""
        return min(self._waiting, key=self._waiting.__getitem__)

    def _set_idle(self, name: str, counter: float) -> None:
        self._idle[name] = counter
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]
