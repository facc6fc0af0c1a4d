"""The pool of KV blocks: reference counts, and the prefix cache by block hash.

Each block is in exactly one of three states:

    free        ref count 0, no content
    evictable   ref count 0, full, registered under its chained hash: reused, or evicted on demand
    owned       ref count >= 1; shared by several sequences only as part of a common prefix, which
                for beams may include the partial last block until one of them writes to it

The pool handles ids and hashes; it knows neither sequences nor the memory of a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from inflight.errors import EngineError
from inflight.kv.eviction import EvictionOrder, Retention


def root_hash(cache_salt: str) -> bytes:
    """The parent hash of a chain's first block: different salts never share blocks."""
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The chained hash of a full block: it covers all tokens from the start of the sequence.

    SHA-256, because a collision would leak one client's context to another.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Ref counts, free list and prefix map of `num_blocks` KV blocks; O(1) per block.

    Eviction is by priority, LRU by release time within one, and happens only when no block is free.
    `release` releases a table's tail first, so a chain loses its end before its beginning.

    Attributes:
        now: the time, in seconds of one clock; set by the caller.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        queries: blocks requested in `acquire` so far.
        hits: blocks found in `acquire` so far.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.now = 0.0
        self.queries = 0
        self.hits = 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # of blocks in the prefix map
        self._by_hash: dict[bytes, int] = {}
        # A stack: the block released last is likely still in a hardware cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: EvictionOrder[int] = EvictionOrder(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still return: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix map, owned or not."""
        return len(self._by_hash)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_shared(self, block: int) -> bool:
        """Whether a write to this block could be seen by another owner.

        True for a block with several owners, and for one in the prefix map, which may get more.
        Writers copy such a block first.
        """
        return self._ref_counts[block] > 1 or self._hashes[block] is not None

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain of hashes; acquires nothing."""
        found = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: bytes) -> int | None:
        """The block with this hash in the prefix map."""
        return self._by_hash.get(key)

    def is_cached(self, key: bytes) -> bool:
        """Whether a block with this hash is in the prefix map."""
        return key in self._by_hash

    def is_registered(self, block: int, key: bytes) -> bool:
        """Whether it is this block that has this hash in the prefix map."""
        return self._hashes[block] == key

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """`lookup`, and raise the reference counts of the blocks found."""
        blocks = self.lookup(hashes)
        for block in blocks:
            self._own(block)
        self.queries += len(hashes)
        self.hits += len(blocks)
        return blocks

    def hold(self, key: bytes) -> int | None:
        """Own the cached block with this hash; None if there is none."""
        block = self.find(key)
        if block is not None:
            self._own(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Raise the reference counts of owned blocks.

        Raises:
            EngineError: a block has none; the pool is then as it was before that block.
        """
        for block in blocks:
            if self._ref_counts[block] < 1:
                raise EngineError(f"KV block {block} has no owner and cannot be shared")
            self._ref_counts[block] += 1

    def allocate(self) -> int:
        """Take a block with arbitrary content, with reference count 1.

        Raises:
            EngineError: `num_free` is 0.
        """
        if self._free:
            block = self._free.pop()
        else:
            try:
                block = self._evictable.pop_next(self.now)
            except KeyError:
                raise EngineError(f"all {self.num_blocks} KV blocks are in use") from None
            self._evict(block)
        self._ref_counts[block] = 1
        return block

    def register(self, block: int, key: bytes) -> bool:
        """Register a full block in the prefix map.

        Returns:
            False if it is registered, or one with the same content is. That one stays: two
            sequences that computed the same block concurrently keep one each.
        """
        if key in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[key] = block
        self._hashes[block] = key
        return True

    @property
    def has_retained(self) -> bool:
        """Whether any cached block has another retention than the default."""
        return self._evictable.has_retained

    def retention(self, block: int) -> Retention:
        """Of any block."""
        return self._evictable.retention(block)

    def retain(self, keys: Iterable[bytes], retention: Retention) -> None:
        """The latest user of these blocks, of which some may be cached, wants them kept like this.

        At most half of the pool is pinned.
        """
        blocks = [block for key in keys if (block := self._by_hash.get(key)) is not None]
        self._evictable.retain(blocks, retention, self.now)

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of one table, the only way to do so.

        Raises:
            EngineError: a block has no owner; the pool is then as it was before that block.
        """
        for block in reversed(blocks):
            if self._ref_counts[block] < 1:
                raise EngineError(f"KV block {block} was released twice")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._evictable.add(block)

    def _own(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            self._evictable.remove(block)
        self._ref_counts[block] += 1

    def _evict(self, block: int) -> None:
        key = self._hashes[block]
        if key is not None:
            del self._by_hash[key]
            self._hashes[block] = None
