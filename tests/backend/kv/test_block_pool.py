"""The pool never leaks a block, never gives one to two owners, and never matches a wrong prefix."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.errors import EngineError
from inflight.kv.block_pool import BlockPool, block_hash, root_hash
from inflight.kv.eviction import DEFAULT, Retention

BLOCK_SIZE = 2


def chain(token_ids: list[int], salt: str = "") -> list[bytes]:
    """Hashes of the full blocks of `token_ids`."""
    hashes = []
    parent = root_hash(salt)
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = block_hash(parent, token_ids[start : start + BLOCK_SIZE])
        hashes.append(parent)
    return hashes


def filled(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Own new blocks registered as this chain."""
    blocks = [pool.allocate() for _ in hashes]
    for block, key in zip(blocks, hashes, strict=True):
        pool.register(block, key)
    return blocks


def test_a_block_hash_covers_all_previous_tokens() -> None:
    one, other = chain([1, 2, 3, 4]), chain([9, 2, 3, 4])
    assert one[0] != other[0]
    assert one[1] != other[1], "same tokens in the block, another beginning"
    assert chain([1, 2, 3, 4, 5]) == one, "a block that is not full has no hash"


def test_token_borders_cannot_be_shifted() -> None:
    """Ids are hashed at full width: 1, 2 is not 12, and 256 is not 0, 1."""
    parent = root_hash("")
    hashes = {block_hash(parent, ids) for ids in ([1, 2], [12, 0], [0, 12], [256, 0], [0, 1])}
    assert len(hashes) == 5


@pytest.mark.parametrize("salt", ["", "tenant", "\ud800"])
def test_salts_separate_chains(salt: str) -> None:
    assert chain([1, 2], salt) != chain([1, 2], "another")


def test_all_blocks_can_be_owned_and_no_more() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(EngineError, match="all 3 KV blocks"):
        pool.allocate()


def test_a_released_prefix_is_found_again() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    hashes = chain([1, 2, 3, 4])
    blocks = filled(pool, hashes)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.acquire([*hashes, b"unknown"]) == blocks
    assert pool.num_free == 2
    assert (pool.hits, pool.queries) == (2, 3)


def test_lookup_takes_no_reference() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    hashes = chain([1, 2])
    blocks = filled(pool, hashes)
    pool.release(blocks)
    assert pool.lookup(hashes) == blocks
    assert pool.ref_count(blocks[0]) == 0
    assert (pool.hits, pool.queries) == (0, 0)


def test_lookup_stops_at_the_first_gap() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    hashes = chain([1, 2, 3, 4, 5, 6])
    blocks = [pool.allocate() for _ in hashes]
    pool.register(blocks[0], hashes[0])
    pool.register(blocks[2], hashes[2])
    assert pool.lookup(hashes) == [blocks[0]]


def test_a_free_block_goes_before_any_cached_one() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    blocks = filled(pool, chain([1, 2, 3, 4]))
    pool.release(blocks)
    assert pool.allocate() not in blocks
    assert pool.num_cached == 2


def test_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    hashes = chain([1, 2, 3, 4, 5, 6])
    blocks = filled(pool, hashes)
    pool.release(blocks)
    for left in (2, 1, 0):
        assert pool.allocate() == blocks[left]
        assert pool.lookup(hashes) == blocks[:left]


def test_the_least_recently_released_chain_is_evicted_first() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    old, new = chain([1, 2]), chain([3, 4])
    first, second = filled(pool, old), filled(pool, new)
    pool.release(first)
    pool.release(second)
    pool.release(pool.acquire(old))  # used again: now `new` is the oldest
    assert pool.allocate() == second[0]
    assert pool.lookup(old) == first


def test_the_first_block_with_a_content_remains_the_cached_one() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    hashes = chain([1, 2])
    first, twin = filled(pool, hashes), filled(pool, hashes)
    assert pool.lookup(hashes) == first
    assert pool.is_shared(first[0])
    assert not pool.is_shared(twin[0])
    pool.release(twin)
    assert pool.num_cached == 1


def test_a_cached_block_counts_as_shared_even_with_one_owner() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    block = pool.allocate()
    assert not pool.is_shared(block)
    pool.register(block, chain([1, 2])[0])
    assert pool.is_shared(block)


def test_a_block_with_two_owners_outlives_the_first() -> None:
    pool = BlockPool(1, BLOCK_SIZE)
    hashes = chain([1, 2])
    blocks = filled(pool, hashes)
    assert pool.acquire(hashes) == blocks
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(EngineError, match="released twice"):
        pool.release([block])
    assert pool.num_free == 2


def test_a_shared_block_is_freed_with_its_last_owner() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    blocks = [pool.allocate()]
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.release(blocks)
    assert pool.num_free == 1
    assert not pool.is_shared(blocks[0])
    pool.release(blocks)
    assert pool.num_free == 2
    with pytest.raises(EngineError, match="has no owner and cannot be shared"):
        pool.share(blocks)


def test_blocks_of_lower_priority_are_evicted_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    low, middle, high = (chain([number, number]) for number in range(3))
    for hashes, priority in ((high, 90), (low, 10), (middle, 35)):
        pool.release(filled(pool, hashes))
        pool.retain(hashes, Retention(priority))
    pool.allocate()  # the free one
    found = []
    for _ in range(3):
        pool.allocate()
        found.append([hashes for hashes in (low, middle, high) if pool.lookup(hashes)])
    assert found == [[middle, high], [high], []]


def test_a_pinned_block_survives_any_traffic_and_is_given_away_at_need() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pinned = chain([1, 2, 3, 4])
    pool.release(filled(pool, pinned))
    pool.retain(pinned, Retention(100))
    for number in range(5, 30):
        pool.release(filled(pool, chain([number, number, number, number])))
        assert len(pool.lookup(pinned)) == 2
    assert sorted(pool.allocate() for _ in range(4)) == [0, 1, 2, 3]
    assert not pool.has_retained


def test_at_most_half_of_the_pool_is_pinned() -> None:
    pool = BlockPool(6, BLOCK_SIZE)
    hashes = chain(list(range(8)))
    blocks = filled(pool, hashes)
    pool.retain(hashes, Retention(100))
    assert [pool.retention(block).priority for block in blocks] == [100, 100, 100, 99]


def test_what_is_not_cached_has_no_retention() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    pool.retain(chain([1, 2]), Retention(100))
    assert not pool.has_retained


class PoolMachine(RuleBasedStateMachine):
    """Tables are created and freed; a model with full histories predicts each block's content."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.released: list[int] = []  # cached blocks without owner, least recent first
        self.timed: set[int] = set()  # blocks that may have lost their priority, which is a use

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=2, max_size=8), salt=st.sampled_from("ab"))
    def start(self, token_ids: list[int], salt: str) -> None:
        hashes = chain(token_ids, salt)
        history = [(ord(salt), *token_ids[: (i + 1) * BLOCK_SIZE]) for i in range(len(hashes))]
        known = self.pool.lookup(hashes)
        for block, tokens in zip(known, history, strict=False):
            assert self.content[block] == tokens, "a lookup returned a block of another chain"
        idle = sum(self.pool.ref_count(block) == 0 for block in known)
        if len(hashes) - len(known) + idle > self.pool.num_free:
            return
        blocks = self.pool.acquire(hashes)
        assert blocks == known
        self.tables.append(blocks)
        self.released = [block for block in self.released if block not in blocks]
        for tokens, key in list(zip(history, hashes, strict=True))[len(known) :]:
            block = self._allocate()
            self.content[block] = tokens
            self.pool.register(block, key)
            blocks.append(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.tables)))
        self.pool.share(blocks)
        self.tables.append(blocks)

    @rule()
    def take_one(self) -> None:
        if self.pool.num_free:
            self.tables.append([self._allocate()])

    @precondition(lambda self: self.tables)
    @rule(
        data=st.data(),
        priority=st.sampled_from([35, 35, 35, 0, 60, 100]),
        ttl=st.sampled_from([math.inf, 2.0]),
        seconds=st.sampled_from([0.0, 1.0]),
    )
    def end(self, data: st.DataObject, priority: int, ttl: float, seconds: float) -> None:
        self.pool.now += seconds
        index = data.draw(st.integers(0, len(self.tables) - 1))
        blocks = self.tables.pop(index)
        keys = [self.pool._hashes[block] for block in blocks]
        cached = [key for key in keys if key is not None]
        raised = {one for one in self.released if self._priority(one) > DEFAULT.priority}
        self.pool.retain(cached, Retention(priority, self.pool.now + ttl))
        self.timed |= {one for one in raised if self.pool.retention(one) is DEFAULT}
        if ttl < math.inf:
            self.timed.update(blocks)
        self.pool.release(blocks)
        self.released += [
            block
            for block in reversed(blocks)
            if self.pool.ref_count(block) == 0 and self.pool.is_shared(block)
        ]

    def _allocate(self) -> int:
        owned = {block for blocks in self.tables for block in blocks}
        free = self.NUM_BLOCKS - len(owned | set(self.released))
        priorities = {one: self._priority(one) for one in self.released}
        block = self.pool.allocate()
        assert block not in owned, "given to two owners"
        assert self.pool.ref_count(block) == 1
        assert not self.pool.is_shared(block)
        assert (block in self.released) == (free == 0), "a cached block goes only at need"
        if block in self.released:
            assert priorities[block] == min(priorities.values()), "not of the lowest priority"
            earlier = self.released[: self.released.index(block)]
            equal = {one for one in earlier if priorities[one] == priorities[block]}
            assert equal <= self.timed, "not the least recently released"
            self.released.remove(block)
        self.timed.discard(block)
        assert self.pool.retention(block) is DEFAULT
        self.content.pop(block, None)
        return block

    def _priority(self, block: int) -> int:
        priority, expires_at = self.pool.retention(block)
        return priority if expires_at > self.pool.now else DEFAULT.priority

    @invariant()
    def few_blocks_are_pinned(self) -> None:
        retained = [block for block in range(self.NUM_BLOCKS) if self.pool.retention(block)[0] > 99]
        assert len(retained) <= self.NUM_BLOCKS // 2
        assert all(self.pool.is_shared(block) for block in retained), "it is not cached"

    @invariant()
    def counts_agree(self) -> None:
        owners = [0] * self.NUM_BLOCKS
        for blocks in self.tables:
            for block in blocks:
                owners[block] += 1
        assert [self.pool.ref_count(block) for block in range(self.NUM_BLOCKS)] == owners
        assert self.pool.num_free == owners.count(0)

    def teardown(self) -> None:
        for blocks in self.tables:
            self.pool.release(blocks)
        assert self.pool.num_free == self.NUM_BLOCKS
        assert len({self.pool.allocate() for _ in range(self.NUM_BLOCKS)}) == self.NUM_BLOCKS
        assert self.pool.num_cached == 0


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
