"""Keys are evicted by priority, then LRU; pins and times end when they should."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.core.request import DEFAULT_CACHE_PRIORITY, PINNED_CACHE_PRIORITY
from inflight.kv.eviction import DEFAULT, EvictionOrder, Retention


def order_of(*priorities: int, size: int = 20) -> EvictionOrder[int]:
    """Keys 0, 1, ... of these priorities, used in this order."""
    order: EvictionOrder[int] = EvictionOrder(size)
    for key, priority in enumerate(priorities):
        order.add(key)
        order.retain([key], Retention(priority), 0.0)
    return order


def popped(order: EvictionOrder[int], now: float = 0.0) -> list[int]:
    return [order.pop_next(now) for _ in range(len(order))]


def test_keys_go_by_priority_and_the_least_recently_used_first() -> None:
    assert popped(order_of(35, 60, 0, 35, 60, 100, 0)) == [2, 6, 0, 3, 1, 4, 5]


def test_the_last_key_is_followed_by_an_error() -> None:
    order = order_of(35, 60)
    popped(order)
    with pytest.raises(KeyError):
        order.pop_next(0.0)


def test_a_retention_is_kept_while_a_key_is_in_use() -> None:
    order = order_of(60, 35)
    order.remove(0)
    assert len(order) == 1
    order.add(0)
    assert popped(order) == [1, 0]


def test_a_retention_ends_with_the_eviction() -> None:
    order = order_of(100, 60)
    popped(order)
    assert (order.has_retained, order.num_pinned) == (False, 0)
    assert order.retention(0) is DEFAULT


def test_the_latest_user_decides() -> None:
    order = order_of(60, 35)
    order.retain([1, 0], Retention(10), 0.0)
    order.retain([0], DEFAULT, 0.0)
    assert popped(order) == [1, 0]


def test_a_pinned_key_stays_pinned_for_the_longest_time() -> None:
    order = order_of(100, 35)
    order.retain([0], DEFAULT, 0.0)
    order.retain([0], Retention(100, 5.0), 0.0)
    assert order.retention(0) == Retention(100, math.inf)
    order.retain([1], Retention(100, 5.0), 0.0)
    order.retain([1], Retention(100, 3.0), 0.0)
    order.retain([1], Retention(80), 4.0)
    assert order.retention(1) == Retention(100, 5.0)
    order.retain([1], Retention(80), 5.0)
    assert order.retention(1) == Retention(80, math.inf)


def test_a_time_that_has_ended_leaves_the_default_priority() -> None:
    order = order_of(35, 35, 35)
    order.retain([0, 1], Retention(100, 7.0), 0.0)
    order.retain([2], Retention(0, 6.0), 0.0)
    order.add(3)
    assert order.pop_next(5.9) == 2
    assert popped(order, 7.0) == [3, 1, 0]
    assert order.num_pinned == 0


def test_a_use_extends_the_time() -> None:
    order = order_of(35, 35)
    order.retain([0], Retention(60, 7.0), 0.0)
    order.retain([0], Retention(60, 9.0), 2.0)
    assert popped(order, 8.0) == [1, 0]


def test_more_pins_than_allowed_have_the_priority_below() -> None:
    order = order_of(100, 100, 100, size=5)
    assert order.num_pinned == 2
    assert order.retention(2) == Retention(99)
    assert order.pop_next(0.0) == 2


def test_a_pin_whose_time_has_ended_makes_room_for_another() -> None:
    order = order_of(35, 35, size=2)
    order.retain([0], Retention(100, 3.0), 0.0)
    order.retain([1], Retention(100), 3.0)
    assert (order.retention(0), order.retention(1)) == (DEFAULT, Retention(100))


def test_a_quarter_has_no_raised_priority() -> None:
    order = order_of(80, 60, 60, size=4)
    order.add(3)
    order.retain([3], Retention(90), 0.0)
    assert [order.retention(key).priority for key in range(4)] == [80, 35, 60, 90]
    order.retain([1], Retention(50), 0.0)
    assert order.retention(1) is DEFAULT, "all others are more important"
    order.remove(2)
    order.retain([1], Retention(60), 0.0)
    assert order.retention(1) is DEFAULT, "the other of this priority is in use"


def test_a_pin_is_not_given_up_for_another() -> None:
    order = order_of(100, 100, 100, size=4)
    assert [order.retention(key).priority for key in range(3)] == [100, 100, 99]
    order.add(3)
    order.retain([3], Retention(100), 0.0)
    assert [order.retention(key).priority for key in range(4)] == [100, 100, 35, 99]


def test_a_chain_is_kept_from_its_beginning_and_evicted_from_its_end() -> None:
    order: EvictionOrder[int] = EvictionOrder(8)
    for key in reversed(range(8)):
        order.add(key)
    order.retain(range(8), Retention(100), 0.0)
    priorities = [order.retention(key).priority for key in range(8)]
    assert priorities == [100, 100, 100, 100, 99, 99, 35, 35]
    assert popped(order) == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_chain_does_not_take_the_place_of_its_own_beginning(is_in_use: bool) -> None:
    order: EvictionOrder[int] = EvictionOrder(8)
    for key in reversed(range(8)):
        order.add(key)
        if is_in_use:
            order.remove(key)
    order.retain(range(8), Retention(60), 0.0)
    assert [order.retention(key).priority for key in range(8)] == [60] * 6 + [35] * 2


def test_a_key_that_is_used_often_is_noted_few_times() -> None:
    order = order_of(35)
    for now in range(10_000):
        order.retain([0], Retention(60, now + 3600.0), float(now))
    assert len(order._ends) < 50


class OrderMachine(RuleBasedStateMachine):
    """Keys are used and evicted; a model has the retention of each and when it was last used."""

    SIZE = 7
    MAX_PINNED, MAX_RAISED = 3, 5

    def __init__(self) -> None:
        super().__init__()
        self.order: EvictionOrder[int] = EvictionOrder(self.SIZE)
        self.now = 0.0
        self.num_uses = 0
        self.evictable: dict[int, int] = {}  # by key, its last use
        self.in_use: set[int] = set()
        self.wanted: dict[int, Retention] = {}
        self.timed: set[int] = set()  # had a time that may have ended: used at the end of it

    def _current(self, key: int) -> Retention:
        retention = self.wanted.get(key, DEFAULT)
        return retention if retention.expires_at > self.now else DEFAULT

    def _use(self, key: int) -> None:
        self.num_uses += 1
        self.evictable[key] = self.num_uses

    @rule()
    def insert(self) -> None:
        if len(self._alive()) == self.SIZE:
            return
        key = self.num_uses
        self.order.add(key)
        self._use(key)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.evictable)))
        self.order.remove(key)
        del self.evictable[key]
        self.in_use.add(key)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.in_use)))
        self.order.add(key)
        self.in_use.remove(key)
        self._use(key)

    @precondition(lambda self: self.evictable or self.in_use)
    @rule(
        data=st.data(),
        priority=st.sampled_from([0, 10, 35, 35, 60, 99, 100, 100]),
        ttl=st.sampled_from([math.inf, math.inf, 1.0, 3.0]),
    )
    def retain(self, data: st.DataObject, priority: int, ttl: float) -> None:
        key = data.draw(st.sampled_from(sorted({*self.evictable, *self.in_use})))
        former = self._current(key)
        before = {one: self._current(one) for one in self._alive()}
        self.order.retain([key], Retention(priority, self.now + ttl), self.now)
        if former.priority == PINNED_CACHE_PRIORITY and priority < PINNED_CACHE_PRIORITY:
            return
        found = self.order.retention(key)
        if priority == PINNED_CACHE_PRIORITY:
            others = [one for one in self._alive() if one != key]
            is_full = len([one for one in others if self._is_pinned(one)]) >= self.MAX_PINNED
            priority = 99 if is_full else 100
        self._check_others(key, priority, before)
        if found.priority != priority:
            assert found is DEFAULT
            assert self.order.num_raised == self.MAX_RAISED
        elif found is not DEFAULT:
            assert found.expires_at >= self.now + ttl
        self.wanted[key] = found
        if key in self.evictable and (found, former) != (DEFAULT, DEFAULT):
            self._use(key)
        if ttl < math.inf:
            self.timed.add(key)

    def _check_others(self, key: int, priority: int, before: dict[int, Retention]) -> None:
        """At most one other key has lost its retention, which was the least important."""
        raised = [one for one, kept in before.items() if kept.priority > DEFAULT.priority]
        for one in self._alive() - {key}:
            if before[one] is not DEFAULT and self.order.retention(one) is DEFAULT:
                assert len(raised) == self.MAX_RAISED and key not in raised
                idle = [before[each].priority for each in raised if each in self.evictable]
                assert before[one].priority == min(idle) <= priority
                assert before[one].priority < PINNED_CACHE_PRIORITY
                self.wanted[one] = DEFAULT
                self._use(one)
                raised.remove(one)

    @precondition(lambda self: self.evictable)
    @rule()
    def evict(self) -> None:
        priorities = {key: self._current(key).priority for key in self.evictable}
        key = self.order.pop_next(self.now)
        assert priorities[key] == min(priorities.values()), "of higher priority than another"
        earlier = [
            one
            for one, used in self.evictable.items()
            if priorities[one] == priorities[key] and used < self.evictable[key]
        ]
        assert self.timed.issuperset(earlier), "another one was used less recently"
        del self.evictable[key]
        self.wanted.pop(key, None)
        self.timed.discard(key)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def _alive(self) -> set[int]:
        return {*self.evictable, *self.in_use}

    def _is_pinned(self, key: int) -> bool:
        return self._current(key).priority == PINNED_CACHE_PRIORITY

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.order) == len(self.evictable)
        assert self.order.num_pinned <= self.MAX_PINNED
        assert self.order.num_raised <= self.MAX_RAISED
        assert self.order.num_pinned >= sum(map(self._is_pinned, self._alive()))
        for key in self._alive():
            if self._current(key) is DEFAULT and self.wanted.get(key, DEFAULT) is DEFAULT:
                assert self.order.retention(key) is DEFAULT

    def teardown(self) -> None:
        assert {self.order.pop_next(math.inf) for _ in self.evictable} == set(self.evictable)
        assert len(self.order) == 0
        assert DEFAULT.priority == DEFAULT_CACHE_PRIORITY


OrderMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestOrder = OrderMachine.TestCase
