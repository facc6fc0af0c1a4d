"""The prefix cache's second tier: KV blocks in host memory, by block hash.

A full block is copied to host memory in the background soon after it has been registered in the
prefix cache (write-through, as in SGLang's HiCache), so that its eviction from the pool costs
nothing. A request that finds a part of its prefix here loads it instead of computing it. So does a
preempted one: its full blocks are here or still in the pool.

    offer -> plan_stores -> in flight -> finish -> cached <-> held by loads
                                           |
                                        abandon
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from inflight.core.batch import Store
from inflight.kv.block_pool import BlockPool
from inflight.kv.eviction import EvictionOrder, Retention


class _InFlight(NamedTuple):
    """A copy to host memory that has not ended."""

    block: int
    slot: int
    key: bytes


class HostCache:
    """Which slot of host memory holds which block of the prefix cache.

    Eviction is by priority, and LRU within one. At most half of the slots are pinned.

    A block that is being stored keeps an owner in the pool, so it is not overwritten meanwhile. Few
    blocks of the pool are in flight at a time: what is offered meanwhile waits, and is dropped if
    it leaves the prefix cache before its turn.

    Args:
        num_slots: blocks that host memory holds.
        pool: the blocks of the device.

    Attributes:
        num_slots: blocks that host memory holds.
        num_stored: blocks copied to host memory so far.
        num_loaded: blocks copied from it so far.
        num_evicted: blocks that others have replaced.
    """

    def __init__(self, num_slots: int, pool: BlockPool) -> None:
        self.num_slots = num_slots
        self.num_stored = 0
        self.num_loaded = 0
        self.num_evicted = 0
        self._pool = pool
        self._max_in_flight = max(1, pool.num_blocks // 8)
        self._slots: dict[bytes, int] = {}  # by hash
        self._evictable: EvictionOrder[bytes] = EvictionOrder(num_slots)  # those not held
        self._free = list(range(num_slots - 1, -1, -1))
        self._holds: Counter[bytes] = Counter()
        self._offered: deque[tuple[int, bytes]] = deque(maxlen=pool.num_blocks)
        self._in_flight: dict[int, _InFlight] = {}  # by ticket
        self._tickets = itertools.count()

    def __len__(self) -> int:
        """Blocks in host memory."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def touch(self, keys: Iterable[bytes]) -> None:
        """Blocks with these hashes, in the pool, are used: they are evicted last here as well."""
        for key in keys:
            if key in self._slots and key not in self._holds:
                self._evictable.remove(key)
                self._evictable.add(key)

    @property
    def has_retained(self) -> bool:
        """Whether any block has another retention than the default."""
        return self._evictable.has_retained

    def retain(self, keys: Iterable[bytes], retention: Retention) -> None:
        """The latest user of these blocks, of which some may be here, wants them kept like this."""
        here = [key for key in keys if key in self._slots]
        self._evictable.retain(here, retention, self._pool.now)

    def hold(self, key: bytes) -> int:
        """The slot of a cached block, which is not evicted until `release`."""
        if key not in self._holds:
            self._evictable.remove(key)
        self._holds[key] += 1
        self.num_loaded += 1
        return self._slots[key]

    def release(self, key: bytes) -> None:
        """End a hold."""
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]
            self._evictable.add(key)

    def offer(self, block: int, key: bytes) -> None:
        """A block has been registered in the prefix cache."""
        self._offered.append((block, key))

    def plan_stores(self) -> list[Store]:
        """The blocks to copy with the next step, which the step does not write to."""
        stores: list[Store] = []
        while self._offered and len(self._in_flight) < self._max_in_flight:
            block, key = self._offered[0]
            if key in self._slots or not self._pool.is_registered(block, key):
                self._offered.popleft()
                continue
            slot = self._take_slot()
            if slot is None:
                break
            self._offered.popleft()
            self._pool.hold(key)
            store = Store(next(self._tickets), block, slot)
            self._in_flight[store.ticket] = _InFlight(block, slot, key)
            stores.append(store)
        return stores

    def finish(self, tickets: Iterable[int]) -> None:
        """These copies have ended: the blocks can be loaded."""
        for ticket in tickets:
            ended = self._in_flight.pop(ticket, None)
            if ended is None:
                continue  # of a step that failed
            retention = self._pool.retention(ended.block)
            self._pool.release([ended.block])
            if ended.key in self._slots:
                self._free.append(ended.slot)
            else:
                self._slots[ended.key] = ended.slot
                self._evictable.add(ended.key)
                self.retain([ended.key], retention)
                self.num_stored += 1

    def abandon(self, stores: Iterable[Store]) -> None:
        """The step of these copies failed: what the slots hold is not known."""
        for store in stores:
            ended = self._in_flight.pop(store.ticket, None)
            if ended is not None:
                self._pool.release([ended.block])
                self._free.append(ended.slot)

    def _take_slot(self) -> int | None:
        """A free slot, or that of the next block to evict; None if all are held."""
        if self._free:
            return self._free.pop()
        if not self._evictable:
            return None
        self.num_evicted += 1
        return self._slots.pop(self._evictable.pop_next(self._pool.now))
