"""An LRU cache bounded by size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """A map whose entries together have a size of at most `max_bytes`.

    Attributes:
        max_bytes: the bound.
        num_bytes: sum of the sizes passed to `put`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Insert a value, evicting the least recently used ones.

        A value larger than the whole cache is not kept.
        """
        self.discard(key)
        if num_bytes > self.max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed

    def discard(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry[1]
