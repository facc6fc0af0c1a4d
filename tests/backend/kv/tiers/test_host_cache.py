"""Host memory keeps what the pool evicts, by hash, and no slot or block is lost on the way."""

from __future__ import annotations

from inflight.core.batch import Load, Store
from inflight.core.sequence import Sequence
from inflight.kv.block_pool import BlockPool
from inflight.kv.eviction import Retention
from inflight.kv.tiers.host_cache import HostCache, HostTier
from inflight.kv.tiers.host_loads import HostLoads
from scheduling import prompt, sequence


def _key(number: int) -> bytes:
    return bytes([number])


def _registered(pool: BlockPool, number: int) -> int:
    """A cached block without an owner."""
    block = pool.allocate()
    pool.register(block, _key(number))
    pool.release([block])
    return block


def _stored(pool: BlockPool, host: HostCache, *numbers: int) -> None:
    for number in numbers:
        host.offer(_registered(pool, number), _key(number))
        host.finish([store.ticket for store in host.plan_stores()])


def _evict_all(pool: BlockPool) -> None:
    pool.release([pool.allocate() for _ in range(pool.num_free)])


def test_a_block_can_be_loaded_only_once_its_copy_has_ended() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(4), pool)
    block = _registered(pool, 1)
    host.offer(block, _key(1))
    stores = host.plan_stores()
    assert [(store.block, store.slot) for store in stores] == [(block, 0)]
    assert _key(1) not in host
    host.finish([stores[0].ticket])
    assert _key(1) in host
    assert host.num_stored == 1


def test_a_block_is_not_evicted_while_it_is_copied() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(4), pool)
    host.offer(_registered(pool, 1), _key(1))
    (store,) = host.plan_stores()
    assert pool.num_free == 7
    others = [pool.allocate() for _ in range(7)]
    assert store.block not in others
    host.finish([store.ticket])
    assert pool.num_free == 1


def test_few_blocks_are_copied_at_a_time_in_order_of_registration() -> None:
    pool = BlockPool(16, 4)
    host = HostCache(HostTier(16), pool)
    blocks = [_registered(pool, number) for number in range(5)]
    for number, block in enumerate(blocks):
        host.offer(block, _key(number))
    first = host.plan_stores()
    assert [store.block for store in first] == blocks[:2]
    assert host.plan_stores() == []
    host.finish([first[0].ticket])
    assert [store.block for store in host.plan_stores()] == blocks[2:3]


def test_what_was_evicted_before_its_turn_is_not_copied() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(4), pool)
    host.offer(_registered(pool, 1), _key(1))
    _evict_all(pool)
    assert host.plan_stores() == []


def test_a_block_is_copied_once() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(4), pool)
    _stored(pool, host, 1)
    _evict_all(pool)
    host.offer(_registered(pool, 1), _key(1))
    assert host.plan_stores() == []
    assert host.num_stored == 1


def test_the_least_recently_used_block_is_replaced() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(2), pool)
    _stored(pool, host, 1, 2)
    host.touch([_key(1)])
    _stored(pool, host, 3)
    assert (_key(1) in host, _key(2) in host, _key(3) in host) == (True, False, True)
    assert host.num_evicted == 1


def test_a_block_that_is_loaded_is_not_replaced() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(2), pool)
    _stored(pool, host, 1, 2)
    host.hold(_key(1))
    host.hold(_key(2))
    host.offer(_registered(pool, 3), _key(3))
    assert host.plan_stores() == []
    host.release(_key(2))
    assert len(host.plan_stores()) == 1
    assert (_key(1) in host, _key(2) in host) == (True, False)


def test_blocks_of_lower_priority_are_replaced_first() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(3), pool)
    _stored(pool, host, 1, 2, 3)
    host.retain([_key(1)], Retention(60))
    host.retain([_key(3)], Retention(10))
    _stored(pool, host, 4, 5)
    assert [number for number in range(1, 6) if _key(number) in host] == [1, 4, 5]


def test_a_copy_has_the_priority_of_its_block() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(2), pool)
    pool.now = 3.0
    block = _registered(pool, 1)
    pool.retain([_key(1)], Retention(100, 9.0))
    host.offer(block, _key(1))
    host.finish([store.ticket for store in host.plan_stores()])
    _stored(pool, host, *range(2, 12))
    assert _key(1) in host
    pool.now = 9.0
    _stored(pool, host, 12, 13)
    assert _key(1) not in host


def test_at_most_half_of_the_slots_are_pinned() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(4), pool)
    _stored(pool, host, 1, 2, 3)
    host.retain(map(_key, (1, 2, 3)), Retention(100))
    assert [host._evictable.retention(_key(number)).priority for number in (1, 2, 3)] == [
        *(100, 100, 99)
    ]


def test_a_pinned_block_is_replaced_if_nothing_else_can_be() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(2), pool)
    _stored(pool, host, 1, 2)
    host.retain([_key(1)], Retention(100))
    host.hold(_key(2))
    _stored(pool, host, 3)
    assert (_key(1) in host, _key(2) in host, _key(3) in host) == (False, True, True)
    assert not host.has_retained


def test_copies_of_a_failed_step_leave_nothing_behind() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(1), pool)
    host.offer(_registered(pool, 1), _key(1))
    stores = host.plan_stores()
    host.abandon(stores)
    assert pool.num_free == 8
    _stored(pool, host, 2)
    assert _key(2) not in host  # the copy may still write to the only slot
    host.finish([stores[0].ticket])
    assert _key(1) not in host
    _stored(pool, host, 2)
    assert _key(2) in host


def _loading(pool: BlockPool) -> tuple[HostCache, HostLoads, Sequence, int]:
    """A sequence that loads a block."""
    host = HostCache(HostTier(1), pool)
    _stored(pool, host, 1)
    _evict_all(pool)
    loads, one = HostLoads(host, pool), sequence(1, prompt(4))
    return host, loads, one, loads.add(one, _key(1))


def test_a_loaded_block_is_cached_once_a_step_has_read_it() -> None:
    pool = BlockPool(8, 4)
    host, loads, one, block = _loading(pool)
    assert loads.take_planned() == [Load(0, block)]
    assert loads.take_planned() == []
    assert one in loads
    assert not pool.is_cached(_key(1))
    loads.confirm(one)
    assert pool.is_registered(block, _key(1))
    assert one not in loads
    _stored(pool, host, 2)  # its slot is not held any more
    assert _key(1) not in host


def test_loads_of_a_sequence_that_loses_its_blocks_are_dropped() -> None:
    pool = BlockPool(8, 4)
    host, loads, one, block = _loading(pool)
    loads.drop(one)
    pool.release([block])
    assert loads.take_planned() == []
    loads.confirm(one)
    assert not pool.is_cached(_key(1))
    _stored(pool, host, 2)
    assert _key(1) not in host


def test_a_late_report_of_an_unknown_copy_is_ignored() -> None:
    pool = BlockPool(8, 4)
    host = HostCache(HostTier(1), pool)
    host.finish([17])
    host.abandon([Store(3, 1, 0)])
    assert len(host) == 0
    assert pool.num_free == 8
