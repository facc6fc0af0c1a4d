"""Block tables: which KV blocks hold a sequence's tokens, and who shares them.

On admission a sequence gets blocks for all its known tokens, shared ones for a cached prefix; from
then on its table grows with it. The tables take free blocks only: when there are none, the
scheduler decides which sequence is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight.core.sequence import Sequence, SequenceGroup
from inflight.kv.block_pool import BlockPool, block_hash, root_hash

Copy = tuple[int, int]
"""(source, target): blocks to copy before a step."""


class BlockTables:
    """Fills and empties `Sequence.blocks`.

    Args:
        pool: the source of blocks.
        enable_prefix_caching: whether blocks of common prefixes are reused.

    Attributes:
        pool: the pool.
        num_reserved: blocks that admissions leave free, one for each admitted sequence that will
            grow. Otherwise a newly admitted sequence would be preempted in the next step.
    """

    def __init__(self, pool: BlockPool, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.num_reserved = 0
        self._enable_prefix_caching = enable_prefix_caching

    def admit(self, group: SequenceGroup) -> list[Copy] | None:
        """Give the members of a group blocks for all known tokens.

        Returns:
            The copies to make before its step writes; None if there are not enough blocks. The
            caller releases the source of a copy once the whole step is planned, so that no block is
            both source and target of a step's copies.
        """
        if group.width == 1:
            copies = self._admit(group.members[0])
        else:
            copies = [] if self._admit_beams(group.members) else None
        if copies is not None:
            self.num_reserved += self.num_reserved_for(group)
        return copies

    def free(self, group: SequenceGroup) -> None:
        """Release the blocks of an admitted group."""
        self.num_reserved -= self.num_reserved_for(group)
        for sequence in group.members:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Empty one table. The tokens stay and are recomputed if needed."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_in_flight = 0
        sequence.generation += 1

    def num_reserved_for(self, group: SequenceGroup) -> int:
        """Blocks that admissions reserve for an admitted group."""
        if group.width > 1:
            return group.width
        return self._may_grow(group.members[0])

    def append(self, sequence: Sequence) -> None:
        """Append a free block to a table whose last one is full.

        The last block of a decoding sequence is never shared: `admit` shares full blocks only, and
        only full blocks are registered. So a decode step never needs copy-on-write.
        """
        sequence.blocks.append(self.pool.allocate())
        self.num_reserved -= not self._may_grow(sequence)

    def reserve_for_drafts(self, sequence: Sequence, wanted: int) -> int:
        """Allocate blocks for up to `wanted` drafts after the next token; returns how many fit.

        Drafts take free blocks only: they never preempt another sequence.
        """
        blocks, size = sequence.blocks, self.pool.block_size
        start = sequence.num_computed
        while start + wanted >= len(blocks) * size and self.pool.num_free > self.num_reserved:
            self.append(sequence)
        return min(wanted, len(blocks) * size - 1 - start)

    def beams_needing_blocks(self, beams: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Beams that need their own block for their next token, with its index in the table.

        Either a new block, or a copy of a shared one, which the first of its sharers keeps.
        """
        writers: set[int] = set()
        others = []
        for beam in beams:
            place = beam.num_computed // self.pool.block_size
            if place < len(beam.blocks) and beam.blocks[place] not in writers:
                writers.add(beam.blocks[place])
            else:
                others.append((beam, place))
        return others

    def copy_on_write(self, places: list[tuple[Sequence, int]]) -> list[Copy]:
        """Give each of these beams its own block at that index; enough blocks must be free.

        Returns:
            The copies to make before the step writes.
        """
        pool, copies = self.pool, []
        for beam, place in places:
            block = pool.allocate()
            if place == len(beam.blocks):
                beam.blocks.append(block)
            else:
                copies.append((beam.blocks[place], block))
                pool.release([beam.blocks[place]])
                beam.blocks[place] = block
        return copies

    def register_prefix(self, sequence: Sequence, start: int, end: int) -> None:
        """Register the full blocks that a committed chunk filled with tokens [start, end)."""
        if not self._enable_prefix_caching:
            return
        size = self.pool.block_size
        hashes = self._hashes_of(sequence, end)
        for index in range(start // size, end // size):
            self.pool.register(sequence.blocks[index], hashes[index])

    def _admit(self, sequence: Sequence) -> list[Copy] | None:
        pool = self.pool
        num_tokens = len(sequence.token_ids)
        hashes = self._hashes_of(sequence, num_tokens) if self._enable_prefix_caching else []
        if sequence.num_scored < sequence.num_prompt_tokens:
            # Positions whose logprobs are requested must be computed, with their whole block.
            hashes = hashes[: (sequence.num_scored - 1) // pool.block_size]
        cached = pool.lookup(hashes)
        # The last token is always computed: its logits give the next one.
        computed = min(len(cached) * pool.block_size, num_tokens - 1)
        num_shared = computed // pool.block_size
        num_new = -(-num_tokens // pool.block_size) - num_shared
        revived = sum(pool.ref_count(block) == 0 for block in cached)
        if revived + num_new + self.num_reserved > pool.num_free:
            return None

        copies = []
        sequence.blocks = pool.acquire(hashes)
        new = [pool.allocate() for _ in range(num_new)]
        if len(cached) > num_shared:
            # Everything is cached: the last token would be written to a shared block, so copy it.
            copies.append((sequence.blocks.pop(), new[0]))
        sequence.blocks += new
        sequence.num_computed = computed
        return copies

    def _admit_beams(self, beams: tuple[Sequence, ...]) -> bool:
        """As `_admit`, for all beams of a search: one with a prompt, or several of equal length.

        Common full blocks are taken once, whether or not the prefix cache still has them. So a
        search needs no more blocks than before its preemption, except for partial blocks that its
        beams still shared.
        """
        pool, size = self.pool, self.pool.block_size
        num_tokens = len(beams[0].token_ids)
        num_full = (num_tokens - 1) // size  # blocks without the last token
        chains = [self._hashes_of(beam, num_tokens)[:num_full] for beam in beams]
        known = [pool.lookup(chain) if self._enable_prefix_caching else [] for chain in chains]
        # For each beam, the earlier one with the longest common prefix, and its length in blocks.
        common = [
            _longest_common_prefix(chains[:index], chain) for index, chain in enumerate(chains)
        ]
        revived = {block for blocks in known for block in blocks if not pool.ref_count(block)}
        num_new = sum(
            -(-num_tokens // size) - max(len(blocks), count)
            for blocks, (_, count) in zip(known, common, strict=True)
        )
        if len(revived) + num_new + self.num_reserved > pool.num_free:
            return False

        for beam, chain in zip(beams, chains, strict=True):
            if self._enable_prefix_caching:
                beam.blocks = pool.acquire(chain)
        for beam, (other, count) in zip(beams, common, strict=True):
            if count > len(beam.blocks):
                more = beams[other].blocks[len(beam.blocks) : count]
                pool.share(more)
                beam.blocks += more
            beam.num_computed = len(beam.blocks) * size
            while len(beam.blocks) * size < num_tokens:
                beam.blocks.append(pool.allocate())
        return True

    def _may_grow(self, sequence: Sequence) -> bool:
        """Whether it may need more blocks; its last token's KV is never computed."""
        return len(sequence.blocks) * self.pool.block_size < sequence.max_length - 1

    def _hashes_of(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Hashes of at least the full blocks in the first `num_tokens`, each computed once."""
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
