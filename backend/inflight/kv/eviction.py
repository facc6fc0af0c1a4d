"""The order in which cached blocks are evicted: by priority, then LRU."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, TypeVar

from inflight.core.request import DEFAULT_CACHE_PRIORITY, PINNED_CACHE_PRIORITY

K = TypeVar("K", int, bytes)


class Retention(NamedTuple):
    """How long a key is kept.

    Attributes:
        priority: keys of lower priority are evicted first.
        expires_at: when the priority becomes the default one, in seconds of the pool's clock.
    """

    priority: int = DEFAULT_CACHE_PRIORITY
    expires_at: float = math.inf


DEFAULT = Retention()


class EvictionOrder(Generic[K]):
    """The keys that can be evicted, in order. O(1) for keys of default priority, otherwise
    O(log n), or O(number of distinct priorities).

    A key has a retention whether or not it can be evicted now; it loses it when it is evicted.
    When its time ends, it counts as used once more, at the default priority.

    Nobody can take all of it for long: at most half of the keys are pinned, others get the priority
    below; and at most three quarters are raised, which is to have more than the default priority.
    Beyond that, those of the lowest of these priorities have the default one, the least recently
    used first.

    Args:
        size: keys that there can be.

    Attributes:
        num_pinned: keys that are pinned.
        num_raised: keys of more than the default priority.
    """

    def __init__(self, size: int) -> None:
        self.num_pinned = 0
        self.num_raised = 0
        self._max_pinned = size // 2
        self._max_raised = size * 3 // 4
        # Of default priority, least recently used first: all keys, unless clients ask for more.
        self._default: OrderedDict[K, None] = OrderedDict()
        self._levels: dict[int, OrderedDict[K, None]] = {}  # by other priorities, none empty
        self._retained: dict[K, Retention] = {}  # of any other than the default
        # A heap of when they end, with those of former retentions.
        self._ends: list[tuple[float, int, K]] = []
        # Of keys that end at the same time, the last noted ends first: the end of a chain.
        self._numbers = itertools.count(0, -1)

    def __len__(self) -> int:
        """Keys that can be evicted."""
        if not self._levels:
            return len(self._default)
        return len(self._default) + sum(map(len, self._levels.values()))

    @property
    def has_retained(self) -> bool:
        """Whether any key has another retention than the default."""
        return bool(self._retained)

    def retention(self, key: K) -> Retention:
        """Of any key."""
        return self._retained.get(key, DEFAULT)

    def add(self, key: K) -> None:
        """A key that cannot be evicted can be from now on; it is the most recently used."""
        if self._retained and key in self._retained:
            self._levels.setdefault(self._retained[key].priority, OrderedDict())[key] = None
        else:
            self._default[key] = None

    def remove(self, key: K) -> None:
        """A key that can be evicted cannot be until `add`."""
        if key in self._default:
            del self._default[key]
        else:
            priority = self._retained[key].priority
            del self._levels[priority][key]
            if not self._levels[priority]:
                del self._levels[priority]

    def pop_next(self, now: float) -> K:
        """Remove the next key to evict; its retention is forgotten.

        Raises:
            KeyError: there is none.
        """
        if self._ends:
            self._expire(now)
        if not self._levels:
            key, _ = self._default.popitem(last=False)
            return key
        lowest = min(self._levels)
        if self._default and lowest > DEFAULT_CACHE_PRIORITY:
            return self._default.popitem(last=False)[0]
        key = next(iter(self._levels[lowest]))
        self.remove(key)
        self._forget(key)
        return key

    def retain(self, keys: Iterable[K], wanted: Retention, now: float) -> None:
        """The latest user of these keys wants them to be kept like this.

        Those that are pinned stay pinned, for the longer of both times.

        Args:
            keys: of a chain, from its beginning: where there is room for a part of them, it is for
                the first ones, and the last ones are evicted first.
        """
        self._expire(now)
        changed: dict[K, None] = {}
        for key in keys:
            priority, expires_at = wanted
            former = self.retention(key)
            if former.priority == PINNED_CACHE_PRIORITY:
                if priority < PINNED_CACHE_PRIORITY:
                    continue
                expires_at = max(expires_at, former.expires_at)
            elif priority == PINNED_CACHE_PRIORITY and self.num_pinned >= self._max_pinned:
                priority -= 1
            is_raised = priority > DEFAULT_CACHE_PRIORITY >= former.priority
            if is_raised and not self._make_room(priority, changed):
                priority = DEFAULT_CACHE_PRIORITY
            if priority != DEFAULT_CACHE_PRIORITY:
                self._set(key, Retention(priority, expires_at))
                changed[key] = None
            elif former is not DEFAULT:
                self._set(key, DEFAULT)
                changed[key] = None
        for key in reversed(changed):
            if self._is_in_order(key):
                self.remove(key)
                self.add(key)

    def _make_room(self, priority: int, kept: Collection[K]) -> bool:
        """Whether one more key can be raised to a priority, if need be instead of another that is
        not to be kept."""
        if self.num_raised < self._max_raised:
            return True
        raised = (level for level in self._levels if level > DEFAULT_CACHE_PRIORITY)
        lowest = min(raised, default=PINNED_CACHE_PRIORITY)
        if lowest > priority or lowest == PINNED_CACHE_PRIORITY:
            return False
        oldest = next(iter(self._levels[lowest]))
        if oldest in kept:
            return False
        self._set(oldest, DEFAULT)
        return True

    def _is_in_order(self, key: K) -> bool:
        return key in self._levels.get(self.retention(key).priority, self._default)

    def _set(self, key: K, retention: Retention) -> None:
        former = self._retained.get(key)
        is_in_order = self._is_in_order(key)
        if is_in_order:
            self.remove(key)
        if former is not None:
            self._forget(key)
        if retention is not DEFAULT:
            self._retained[key] = retention
            self._count(retention, 1)
            if retention.expires_at < math.inf:
                self._note_end(key, retention.expires_at)
        if is_in_order:
            self.add(key)

    def _forget(self, key: K) -> None:
        self._count(self._retained.pop(key), -1)

    def _count(self, retention: Retention, number: int) -> None:
        self.num_pinned += number * (retention.priority == PINNED_CACHE_PRIORITY)
        self.num_raised += number * (retention.priority > DEFAULT_CACHE_PRIORITY)

    def _note_end(self, key: K, expires_at: float) -> None:
        if len(self._ends) > 2 * len(self._retained) + 16:  # most are of former retentions
            self._ends = [end for end in self._ends if self._is_current(end)]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (expires_at, next(self._numbers), key))

    def _is_current(self, end: tuple[float, int, K]) -> bool:
        expires_at, _, key = end
        return self.retention(key).expires_at == expires_at

    def _expire(self, now: float) -> None:
        """Give those keys the default retention whose time has ended."""
        while self._ends and self._ends[0][0] <= now:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                self._set(end[2], DEFAULT)
