"""Block tables: which KV blocks hold a sequence's tokens, and who shares them.

On admission a sequence gets blocks for all its known tokens, shared ones for a cached prefix; from
then on its tables grow with it, and blocks that no sliding window reaches any more are freed. The
tables take free blocks only: when there are none, the scheduler decides which sequence is
preempted.

A prefix is cached if all its blocks are, but for those that no window reaches from its end on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from inflight.core.batch import Batch, Load, Store
from inflight.core.request import DEFAULT_CACHE_PRIORITY
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.kv.block_pool import BlockPool, block_hash, root_hash
from inflight.kv.eviction import Retention
from inflight.kv.layout import KVTables
from inflight.kv.pending_prefixes import WORTH_TOKENS, PendingPrefixes
from inflight.kv.tiers.host_cache import HostCache
from inflight.kv.tiers.host_loads import HostLoads

Copy = tuple[int, int]
"""(source, target): blocks to copy before a step."""

WORTH_SHARING_TOKENS = 1 << 14
"""Cached tokens of all sequences, below which no prefix is worth being read once for those that
share it (see `Cascade.min_saved` of the kernels)."""

Place = tuple[Sequence, int, int]
"""(beam, table, index): an entry of a block table, which may be the next one."""

_FREED = 0
"""Entry of a block table for a block that is not needed: any id, for it is never read."""


class BlockTables:
    """Fills and empties `Sequence.tables`.

    Args:
        pool: the source of blocks.
        enable_prefix_caching: whether blocks of common prefixes are reused.
        kv_tables: the block tables of each sequence; None for one that keeps all tokens.
        host: blocks in host memory, as the prefix cache's second tier; None for none.

    Attributes:
        pool: the pool.
        num_reserved: blocks that admissions leave free, one for each admitted sequence that will
            grow. Otherwise a newly admitted sequence would be preempted in the next step.
    """

    def __init__(
        self,
        pool: BlockPool,
        enable_prefix_caching: bool,
        kv_tables: KVTables | None = None,
        host: HostCache | None = None,
    ) -> None:
        kv_tables = kv_tables or KVTables.single(pool.block_size)
        self.pool = pool
        self._host = host
        self._loads = None if host is None else HostLoads(host, pool)
        self._cached: dict[Sequence, int] = {}  # tokens, of running sequences
        self._num_cached = 0
        self._fetched_for: Sequence | None = None
        self._fetched: set[bytes] = set()  # blocks that were read from disk for it
        self.num_reserved = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._pending = PendingPrefixes(pool.block_size)
        self._tables, self._spans = kv_tables.tables, kv_tables.spans
        self._frees_windows = kv_tables.frees_windows
        # A cached prefix ends with a block in each table.
        self._unit = max(self._spans)

    def awaits_prefix(self, group: SequenceGroup, end_of: Callable[[Sequence], int]) -> bool:
        """Whether steps in flight compute a long part of a group's prompt, which is then cached.

        Args:
            group: that may be admitted.
            end_of: see `PendingPrefixes.num_in_flight`.
        """
        if not self._pending or group.width > 1:
            return False
        sequence = group.members[0]
        hashes = self._hashes_of(sequence, sequence.num_prompt_tokens)
        first = self._num_cached_tokens(hashes, self.pool.is_cached) // self.pool.block_size
        return self._pending.num_in_flight(hashes, first, end_of) >= WORTH_TOKENS

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefixes that sequences share may be long enough to be read once for them."""
        return self._num_cached >= WORTH_SHARING_TOKENS

    def awaits_disk(self, group: SequenceGroup) -> bool:
        """Whether a part of a group's prefix is being read from disk; starts to read it."""
        host, sequence = self._host, group.members[0]
        if host is None or host.disk is None:
            return False
        if self._fetched_for is not sequence:
            self._fetched_for, self._fetched = sequence, set()
        hashes = self._reusable_hashes(sequence)
        end = self._num_cached_tokens(hashes, self._is_on_any_tier)
        keys = [
            key
            for index, (table, span) in enumerate(zip(self._tables, self._spans, strict=True))
            for key in self._keys(index, hashes, table.first_kept(end) // span, end // span)
        ]
        return host.fetch(keys, self._fetched)

    def admit(self, group: SequenceGroup, num_kept_free: int = 0) -> list[Copy] | None:
        """Give the members of a group blocks for all known tokens.

        Args:
            group: it has no blocks.
            num_kept_free: blocks to leave free; at least `num_reserved` are.

        Returns:
            The copies to make before its step writes; None if there are not enough blocks. The
            caller releases the source of a copy once the whole step is planned, so that no block is
            both source and target of a step's copies.
        """
        num_free = self.pool.num_free - max(self.num_reserved, num_kept_free)
        if group.width == 1:
            copies = self._admit(group.members[0], num_free)
        else:
            copies = [] if self._admit_beams(group.members, num_free) else None
        if copies is not None:
            self.num_reserved += self.num_reserved_for(group)
        return copies

    def free(self, group: SequenceGroup) -> None:
        """Release the blocks of an admitted group."""
        self.num_reserved -= self.num_reserved_for(group)
        for sequence in group.members:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Empty a sequence's tables. The tokens stay and are recomputed if needed."""
        if self._pending:
            self._pending.remove(sequence, sequence.block_hashes)
        if self._loads is not None:
            self._loads.drop(sequence)
        for index, (first, table) in enumerate(
            zip(sequence.first_blocks, sequence.tables, strict=True)
        ):
            self._retain(sequence, index, first, len(table))
        for first, table in zip(sequence.first_blocks, sequence.tables, strict=True):
            self.pool.release(table[first:])
        self._num_cached -= self._cached.pop(sequence, 0)
        self._set(sequence, [[] for _ in self._tables])
        sequence.num_computed = 0
        sequence.num_in_flight = 0
        sequence.generation += 1

    def share(self, fork: Sequence) -> None:
        """Count the blocks of a fork, which shares them with its original."""
        for first, table in zip(fork.first_blocks, fork.tables, strict=True):
            self.pool.share(table[first:])

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether it has loaded blocks from host memory, and no step of it was committed since."""
        return self._loads is not None and sequence in self._loads

    @property
    def num_loading(self) -> int:
        """Sequences with such loads."""
        return 0 if self._loads is None else len(self._loads)

    @property
    def num_planned_loads(self) -> int:
        """Loads of the step that is being planned."""
        return 0 if self._loads is None else self._loads.num_planned

    def take_loads(self) -> list[Load]:
        """The loads of the sequences that were admitted in the step that has been planned."""
        return [] if self._loads is None else self._loads.take_planned()

    def plan_stores(self) -> list[Store]:
        """Full blocks to copy to host memory with the step that has been planned."""
        return [] if self._host is None else self._host.plan_stores()

    def stored(self, tickets: Iterable[int]) -> None:
        """These copies to host memory have ended."""
        if self._host is not None:
            self._host.finish(tickets)

    def abandon(self, batch: Batch) -> list[Sequence]:
        """The step of a batch failed: forget the blocks that it was to store.

        Returns:
            The sequences whose loads were not confirmed, and may have failed with it.
        """
        if self._host is None or self._loads is None:
            return []
        self._host.abandon(batch.stores)
        return self._loads.sequences

    def num_shared(self, group: SequenceGroup) -> int:
        """Blocks of a group that has just been admitted which others have as well."""
        first = group.members[0]
        if not first.num_computed:
            return 0
        return sum(
            self.pool.ref_count(block) > 1
            for start, table, span in zip(
                first.first_blocks, first.tables, self._spans, strict=True
            )
            for block in table[start : -(-first.num_computed // span)]
        )

    def num_reserved_for(self, group: SequenceGroup) -> int:
        """Blocks that admissions reserve for an admitted group."""
        if group.width > 1:
            return group.width * len(self._tables)
        return self._may_grow(group.members[0]) * len(self._tables)

    def num_to_append(self, sequence: Sequence) -> int:
        """Blocks that `append` takes."""
        if len(self._spans) == 1:
            return 1
        return sum(
            len(table) * span <= sequence.capacity
            for table, span in zip(sequence.tables, self._spans, strict=True)
        )

    def append(self, sequence: Sequence) -> None:
        """Append a free block to each table that is full.

        The last block of a decoding sequence is never shared: `admit` shares full blocks only, and
        only full blocks are registered. So a decode step never needs copy-on-write.
        """
        former, ends = sequence.capacity, []
        for table, span in zip(sequence.tables, self._spans, strict=True):
            if len(table) * span <= former:
                table.append(self.pool.allocate())
            ends.append(len(table) * span)
        sequence.capacity = min(ends)
        if not self._may_grow(sequence):
            self.num_reserved -= len(self._tables)

    def reserve_for_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Allocate blocks for up to `wanted` drafts after the next token; returns how many fit.

        Drafts take free blocks only: they never preempt another sequence.
        """
        start = sequence.num_computed
        while start + wanted >= sequence.capacity:
            if self.pool.num_free < self.num_reserved + self.num_to_append(sequence):
                break
            self.append(sequence)
        return min(wanted, sequence.capacity - 1 - start)

    def beams_needing_blocks(self, beams: Iterable[Sequence]) -> list[Place]:
        """Where beams need blocks of their own for their next tokens.

        Either a new block, or a copy of a shared one, which the first of its sharers keeps.
        """
        writers: set[int] = set()
        others = []
        for beam in beams:
            for table, span in enumerate(self._spans):
                blocks, index = beam.tables[table], beam.num_computed // span
                if index < len(blocks) and blocks[index] not in writers:
                    writers.add(blocks[index])
                else:
                    others.append((beam, table, index))
        return others

    def copy_on_write(self, places: list[Place]) -> list[Copy]:
        """Give each of these beams its own block at that place; enough blocks must be free.

        Returns:
            The copies to make before the step writes.
        """
        pool, copies = self.pool, []
        for beam, table, index in places:
            blocks, block = beam.tables[table], pool.allocate()
            if index == len(blocks):
                blocks.append(block)
                self._set_capacity(beam)
            else:
                copies.append((blocks[index], block))
                pool.release([blocks[index]])
                blocks[index] = block
        return copies

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """Account for committed tokens [start, end): register the blocks that they fill in the
        prefix cache, and free those that no later query reads.
        """
        if self._enable_prefix_caching:
            hashes, size = self._hashes_of(sequence, end), self.pool.block_size
            first_new = start // size
            if self._loads is not None and sequence in self._loads:
                self._loads.confirm(sequence)
                first_new = 0
            if self._pending:
                self._pending.remove(sequence, hashes[first_new : end // size])
            for table, span in enumerate(self._spans):
                first, last = start // span, end // span
                keys = self._keys(table, hashes, first, last)
                for block, key in zip(sequence.tables[table][first:last], keys, strict=True):
                    if self.pool.register(block, key) and self._host is not None:
                        self._host.offer(block, key)
                if sequence.request.cache_priority != DEFAULT_CACHE_PRIORITY:
                    self._retain(sequence, table, first, last)  # for their copies in host memory
        if self._frees_windows:
            self._free_outside_windows(sequence, end)

    def _retain(self, sequence: Sequence, table: int, first: int, end: int) -> None:
        """Blocks [first, end) of a table have a sequence's priority now, as their latest user."""
        request, pool, host = sequence.request, self.pool, self._host
        is_default = request.cache_priority == DEFAULT_CACHE_PRIORITY
        if is_default and not pool.has_retained and not (host and host.has_retained):
            return
        retention = Retention(request.cache_priority)
        if request.cache_ttl_s is not None:
            retention = Retention(request.cache_priority, pool.now + request.cache_ttl_s)
        keys = self._keys(table, sequence.block_hashes, first, end)
        pool.retain(keys, retention)
        if host is not None:
            host.retain(keys, retention)

    def _free_outside_windows(self, sequence: Sequence, position: int) -> None:
        """Free the blocks that no query from `position` on reads; their entries stay."""
        for index, (table, span) in enumerate(zip(self._tables, self._spans, strict=True)):
            first, kept = sequence.first_blocks[index], table.first_kept(position) // span
            if kept > first:
                self._retain(sequence, index, first, kept)
                self.pool.release(sequence.tables[index][first:kept])
                sequence.first_blocks[index] = kept

    def _admit(self, sequence: Sequence, num_free: int) -> list[Copy] | None:
        pool, num_tokens = self.pool, len(sequence.token_ids)
        hashes = self._reusable_hashes(sequence)
        num_cached = self._num_usable_tokens(hashes)
        # The last token is always computed: its logits give the next one.
        computed = min(num_cached, num_tokens - 1)
        firsts, chains, counts = [], [], []
        for index, (table, span) in enumerate(zip(self._tables, self._spans, strict=True)):
            firsts.append(table.first_kept(computed) // span)
            chains.append(self._keys(index, hashes, firsts[-1], num_cached // span))
            counts.append(-(-num_tokens // span) - computed // span)
        if self._num_taken(chains) + sum(counts) > num_free:
            return None

        copies, tables = [], []
        # Of all tables first: a new block may evict any without an owner.
        acquired = self._take(sequence, chains)
        for first, keys, span, count, blocks in zip(
            firsts, chains, self._spans, counts, acquired, strict=True
        ):
            new = [pool.allocate() for _ in range(count)]
            if num_cached > computed // span * span:
                # Everything is cached: the last token would be written to a shared block, so copy
                # it. A block that was loaded is not shared yet.
                if pool.is_registered(blocks[-1], keys[-1]):
                    copies.append((blocks.pop(), new[0]))
                else:
                    pool.release([new.pop()])
            tables.append([_FREED] * first + blocks + new)
        self._set(sequence, tables, firsts)
        if num_cached:
            self._cached[sequence] = num_cached
            self._num_cached += num_cached
        sequence.num_computed = computed
        self._pending.add(sequence, hashes[self._num_registered(hashes, num_cached) :])
        return copies

    def _num_usable_tokens(self, hashes: list[bytes]) -> int:
        """Tokens of the longest cached prefix, on the device alone if loading more is slower than
        computing it."""
        host, num_cached = self._host, self._num_cached_tokens(hashes)
        if host is None or host.min_tokens <= self.pool.block_size:
            return num_cached
        on_device = self._num_cached_tokens(hashes, self.pool.is_cached)
        return num_cached if num_cached - on_device >= host.min_tokens else on_device

    def _num_taken(self, chains: list[list[bytes]]) -> int:
        """Blocks without an owner that cached ones take: evictable ones, and new ones to load."""
        pool = self.pool
        found = [pool.find(key) for keys in chains for key in keys]
        return sum(block is None or pool.ref_count(block) == 0 for block in found)

    def _take(self, sequence: Sequence, chains: list[list[bytes]]) -> list[list[int]]:
        """Blocks of cached keys: those in the pool, and new ones for those in host memory."""
        if self._loads is None:
            return [self.pool.acquire(keys) for keys in chains]
        for keys in chains:
            self._loads.host.touch(keys)  # in use, wherever they are
        held = [[self.pool.hold(key) for key in keys] for keys in chains]
        return [
            [
                self._loads.add(sequence, key) if block is None else block
                for key, block in zip(keys, blocks, strict=True)
            ]
            for keys, blocks in zip(chains, held, strict=True)
        ]

    def _is_cached(self, key: bytes) -> bool:
        """Whether a block is in the prefix cache, on the device or in host memory."""
        return self.pool.is_cached(key) or (self._host is not None and key in self._host)

    def _is_on_any_tier(self, key: bytes) -> bool:
        host = self._host
        return self._is_cached(key) or (
            host is not None and host.disk is not None and key in host.disk
        )

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of its blocks that may come from the prefix cache."""
        if not self._enable_prefix_caching:
            return []
        hashes = self._hashes_of(sequence, len(sequence.token_ids))
        if sequence.num_scored < sequence.num_prompt_tokens:
            # Positions whose logprobs are requested must be computed, with their whole block.
            hashes = hashes[: (sequence.num_scored - 1) // self.pool.block_size]
        return hashes

    def _num_registered(self, hashes: list[bytes], num_cached: int) -> int:
        """Kernel blocks of a cached prefix that the sequence does not load."""
        if self._loads is None or not len(self._loads):
            return num_cached // self.pool.block_size
        return self._num_cached_tokens(hashes, self.pool.is_cached) // self.pool.block_size

    def _num_cached_tokens(
        self, hashes: list[bytes], is_cached: Callable[[bytes], bool] | None = None
    ) -> int:
        """Tokens of the longest cached prefix of a chain of hashes.

        Args:
            hashes: of the chain.
            is_cached: whether a block with this hash counts; None for those on the device and in
                host memory.
        """
        is_cached = is_cached or self._is_cached
        size, unit = self.pool.block_size, self._unit
        end = len(hashes) * size // unit * unit
        for index, (table, span) in enumerate(zip(self._tables, self._spans, strict=True)):
            if table.window:
                end = self._num_cached_in_window(index, hashes, end, is_cached)
            else:
                keys = self._keys(index, hashes, 0, end // span)
                end = sum(1 for _ in takewhile(is_cached, keys)) * span // unit * unit
        return end

    def _num_cached_in_window(
        self, index: int, hashes: list[bytes], end: int, is_cached: Callable[[bytes], bool]
    ) -> int:
        """The longest prefix of up to `end` tokens at whose end a window is cached, in tokens."""
        table, span = self._tables[index], self._spans[index]
        while end:
            # All that its last token reads, as that may be computed again.
            first, block = table.first_kept(end - 1) // span, end // span
            keys = self._keys(index, hashes, first, block)
            while keys and is_cached(keys[-1]):
                keys.pop()
                block -= 1
            if not keys:
                break
            end = (block - 1) * span // self._unit * self._unit
        return end

    def _admit_beams(self, beams: tuple[Sequence, ...], num_free: int) -> bool:
        """As `_admit`, for all beams of a search: one with a prompt, or several of equal length.

        Common full blocks are taken once, whether or not the prefix cache still has them. So a
        search needs no more blocks than before its preemption, except for partial blocks that its
        beams still shared. Where windows free blocks, the prefix cache is not used: beams would
        have to find the same part of their common prefix in it.
        """
        pool, unit = self.pool, self._unit
        num_tokens = len(beams[0].token_ids)
        most = (num_tokens - 1) // unit * unit  # full blocks without the last token
        num_hashes = most // pool.block_size
        chains = [self._hashes_of(beam, num_tokens)[:num_hashes] for beam in beams]
        uses_cache = self._enable_prefix_caching and not self._frees_windows
        cached = [self._num_usable_tokens(chain) if uses_cache else 0 for chain in chains]
        # For each beam, the earlier one with the longest common prefix, and its length in tokens.
        common = [
            _longest_common_prefix(chains[:index], chain) for index, chain in enumerate(chains)
        ]
        shared = [
            (other, max(tokens, count * pool.block_size // unit * unit))
            for tokens, (other, count) in zip(cached, common, strict=True)
        ]
        found = [
            self._keys(0, chain, 0, tokens // unit)
            for chain, tokens in zip(chains, cached, strict=True)
        ]
        distinct = list(dict.fromkeys(key for keys in found for key in keys))
        num_new = sum(
            -(-num_tokens // span) - tokens // span for _, tokens in shared for span in self._spans
        )
        if self._num_taken([distinct]) + num_new > num_free:
            return False

        (taken,) = self._take(beams[0], [distinct])
        block_of = dict(zip(distinct, taken, strict=True))
        for beam, keys in zip(beams, found, strict=True):
            blocks = [block_of[key] for key in keys]
            pool.share(blocks)
            self._set(beam, [blocks] if uses_cache else [[] for _ in self._tables])
        pool.release(taken)  # the beams own them now
        for beam, (other, tokens) in zip(beams, shared, strict=True):
            for index, (table, span) in enumerate(zip(beam.tables, self._spans, strict=True)):
                more = beams[other].tables[index][len(table) : tokens // span]
                pool.share(more)
                table += more
                while len(table) * span < num_tokens:
                    table.append(pool.allocate())
            self._set_capacity(beam)
            beam.num_computed = tokens
        return True

    def _set(
        self, sequence: Sequence, tables: list[list[int]], firsts: list[int] | None = None
    ) -> None:
        sequence.tables = tables
        sequence.first_blocks = firsts or [0] * len(tables)
        self._set_capacity(sequence)

    def _set_capacity(self, sequence: Sequence) -> None:
        sequence.capacity = min(
            len(table) * span for table, span in zip(sequence.tables, self._spans, strict=True)
        )

    def _may_grow(self, sequence: Sequence) -> bool:
        """Whether it may need more blocks; its last token's KV is never computed."""
        return sequence.capacity < sequence.max_length - 1

    def _keys(self, table: int, hashes: list[bytes], first: int, end: int) -> list[bytes]:
        """Keys of blocks [first, end) of a table in the prefix cache."""
        count = self._tables[table].kernel_blocks
        keys = hashes[first * count + count - 1 : end * count : count]
        return [key + bytes([table]) for key in keys] if table else keys

    def _hashes_of(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Hashes of at least the full kernel blocks in the first tokens, each computed once."""
        size = self.pool.block_size
        hashes = sequence.block_hashes
        for start in range(len(hashes) * size, num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
            hashes.append(block_hash(parent, sequence.token_ids[start : start + size]))
        return hashes


def _longest_common_prefix(chains: list[list[bytes]], chain: list[bytes]) -> tuple[int, int]:
    """The chain with the longest common prefix: its index, and that prefix's length in blocks."""
    counts = [sum(a == b for a, b in zip(one, chain, strict=True)) for one in chains]
    return max(enumerate(counts), key=lambda pair: pair[1], default=(0, 0))
