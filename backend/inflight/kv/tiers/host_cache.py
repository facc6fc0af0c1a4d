"""The prefix cache's second tier: KV blocks in host memory, by block hash.

A full block is copied to host memory in the background soon after it has been registered in the
prefix cache (write-through, as in SGLang's HiCache), so that its eviction from the pool costs
nothing. A request that finds a part of its prefix here loads it instead of computing it. So does a
preempted one: its full blocks are here or still in the pool.

    offer -> plan_stores -> in flight -> finish -> cached <-> held by loads and writes
                                           |          ^
                                        abandon     fetch (from disk)
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from inflight.core.batch import Store
from inflight.kv.block_pool import BlockPool
from inflight.kv.eviction import EvictionOrder, Retention
from inflight.kv.tiers.disk_cache import DiskCache


class _InFlight(NamedTuple):
    """A copy to host memory that has not ended."""

    block: int
    slot: int
    key: bytes


@dataclass(frozen=True, slots=True)
class HostTier:
    """What there is below the pool.

    Attributes:
        num_slots: blocks that host memory holds.
        min_tokens: fewer tokens of a prefix are computed sooner than they are loaded.
        disk: blocks on disk; None for none.
    """

    num_slots: int
    min_tokens: int = 1
    disk: DiskCache | None = None


class HostCache:
    """Which slot of host memory holds which block of the prefix cache.

    Eviction is by priority, and LRU within one. At most half of the slots are pinned.

    A block that is being stored keeps an owner in the pool, so it is not overwritten meanwhile. Few
    blocks of the pool are in flight at a time: what is offered meanwhile waits, and is dropped if
    it leaves the prefix cache before its turn.

    With a tier on disk, each block is written there in the background as well, if the disk keeps
    up.

    Args:
        tier: what there is.
        pool: the blocks of the device.

    Attributes:
        num_slots, min_tokens, disk: of the tier.
        num_stored: blocks copied to host memory so far.
        num_loaded: blocks copied from it so far.
        num_evicted: blocks that others have replaced.
    """

    def __init__(self, tier: HostTier, pool: BlockPool) -> None:
        self.num_slots = num_slots = tier.num_slots
        self.min_tokens = tier.min_tokens
        self.disk = tier.disk
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
        self._abandoned: dict[int, int] = {}  # slots of copies of failed steps, by ticket
        self._tickets = itertools.count()
        self._unwritten: deque[bytes] = deque(maxlen=num_slots)
        self._writing: set[bytes] = set()  # to disk
        self._fetching: set[bytes] = set()  # being read from disk

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
        self._hold(key)
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
        self._poll_disk()
        self._write_next()
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
            if ticket in self._abandoned:
                self._free.append(self._abandoned.pop(ticket))
            ended = self._in_flight.pop(ticket, None)
            if ended is None:
                continue
            retention = self._pool.retention(ended.block)
            self._pool.release([ended.block])
            if ended.key in self._slots:
                self._free.append(ended.slot)
            else:
                self._slots[ended.key] = ended.slot
                self._evictable.add(ended.key)
                self.retain([ended.key], retention)
                self.num_stored += 1
                if self.disk is not None:
                    self._unwritten.append(ended.key)

    def abandon(self, stores: Iterable[Store]) -> None:
        """The step of these copies failed. They may still run: their slots are used again once they
        have ended, and never if they were not launched."""
        for store in stores:
            ended = self._in_flight.pop(store.ticket, None)
            if ended is not None:
                self._pool.release([ended.block])
                self._abandoned[store.ticket] = ended.slot

    def fetch(self, keys: Iterable[bytes], tried: set[bytes]) -> bool:
        """Read the blocks from disk that are on no other tier, each at most once.

        Args:
            keys: hashes of the blocks.
            tried: those that were read before; this call adds to them.

        Returns:
            Whether some of them are being read now.
        """
        disk = self.disk
        if disk is None:
            return False
        self._poll_disk()
        is_fetching = False
        for key in keys:
            if key in self._fetching:
                is_fetching = True
            elif not (key in tried or key in self._slots or self._pool.is_cached(key)):
                if disk.is_busy:
                    return True
                if key in disk and (slot := self._take_slot()) is not None:
                    tried.add(key)
                    self._fetching.add(key)
                    disk.read(key, slot)
                    is_fetching = True
        return is_fetching

    @property
    def has_work(self) -> bool:
        """Whether blocks are on their way down, or could be."""
        is_writing = self.disk is not None and bool(self._unwritten or self.disk.has_work)
        return bool(self._offered or self._in_flight) or is_writing

    def _hold(self, key: bytes) -> None:
        if key not in self._holds:
            self._evictable.remove(key)
        self._holds[key] += 1

    def _poll_disk(self) -> None:
        """Take in the reads and writes that have ended."""
        if self.disk is None:
            return
        for key, slot, is_read, is_ok in self.disk.take_ended():
            if not is_read:
                self._writing.discard(key)
                self.release(key)
                continue
            self._fetching.discard(key)
            if is_ok and key not in self._slots:
                self._slots[key] = slot
                self._evictable.add(key)
            else:
                self._free.append(slot)

    def _write_next(self) -> None:
        """Write blocks to disk in the order in which they came, as far as the disk keeps up."""
        disk = self.disk
        while disk is not None and self._unwritten and not disk.is_busy:
            key = self._unwritten.popleft()
            if key in self._slots and key not in disk and key not in self._writing:
                self._hold(key)  # until it is written
                self._writing.add(key)
                disk.write(key, self._slots[key])

    def _take_slot(self) -> int | None:
        """A free slot, or that of the next block to evict; None if all are held."""
        if self._free:
            return self._free.pop()
        if not self._evictable:
            return None
        self.num_evicted += 1
        return self._slots.pop(self._evictable.pop_next(self._pool.now))
