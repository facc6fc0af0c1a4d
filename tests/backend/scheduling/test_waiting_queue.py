"""The queue is fair between classes and tenants, and first in, first out within a tenant."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.core.request import PriorityClass
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.scheduling.waiting_queue import WaitingQueue, key_of
from scheduling import sequence

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE


def waiting(
    request_id: int, tenant: str = "", priority: PriorityClass = INTERACTIVE, length: int = 1
) -> Sequence:
    return sequence(request_id, [1] * length, tenant=tenant, priority_class=priority)


def admit(queue: WaitingQueue) -> SequenceGroup:
    """Admit the head, whose prompt is its whole cost."""
    head = queue.head
    queue.remove(head)
    queue.charge(key_of(head), head.num_prompt_tokens)
    return head


def admitted(queue: WaitingQueue) -> list[int]:
    return [admit(queue).request_id for _ in range(len(queue))]


def test_one_tenant_of_one_class_is_served_in_order() -> None:
    queue = WaitingQueue()
    for request_id in (3, 1, 2):
        queue.push(waiting(request_id, length=request_id))
    queue.push_front(waiting(7))
    assert [one.request_id for one in queue] == [7, 3, 1, 2]
    assert admitted(queue) == [7, 3, 1, 2]


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    queue = WaitingQueue()
    for request_id in range(100):
        queue.push(waiting(request_id, "many"))
    admit(queue)
    queue.push(waiting(100, "few"))
    queue.push(waiting(101, "few"))
    assert admitted(queue)[:5] == [1, 100, 2, 101, 3]


def test_long_requests_count_as_much_as_many_short_ones() -> None:
    queue = WaitingQueue()
    for request_id in range(40):
        queue.push(waiting(request_id, "long", length=10))
        queue.push(waiting(request_id + 100, "short", length=1))
    first = Counter(admit(queue).request.tenant for _ in range(33))
    assert first == {"long": 3, "short": 30}


def test_output_counts_like_prompts() -> None:
    queue = WaitingQueue()
    one = waiting(1, "talks")
    queue.push(one)
    queue.push(waiting(2, "talks"))
    queue.push(waiting(3, "asks"))
    admit(queue)
    queue.charge(key_of(one), 3)
    for request_id in (4, 5, 6):
        queue.push(waiting(request_id, "asks"))
    assert admitted(queue) == [3, 4, 5, 6, 2]


def test_classes_share_by_weight_whatever_their_tenants() -> None:
    queue = WaitingQueue({INTERACTIVE: 4, BATCH: 1})
    for request_id in range(100):
        queue.push(waiting(request_id, str(request_id % 7), BATCH))
        queue.push(waiting(request_id + 100, "", INTERACTIVE))
    first = Counter(admit(queue).request.priority_class for _ in range(100))
    assert first == {INTERACTIVE: 80, BATCH: 20}


def test_a_share_that_nobody_uses_goes_to_the_others() -> None:
    queue = WaitingQueue({INTERACTIVE: 1000, BATCH: 1})
    for request_id in range(5):
        queue.push(waiting(request_id, "", BATCH))
    assert admitted(queue) == [0, 1, 2, 3, 4]


def test_requests_and_tokens_are_counted_by_class() -> None:
    queue = WaitingQueue()
    one, two = waiting(1, "x", BATCH, length=5), waiting(2, "y", INTERACTIVE, length=7)
    queue.push(one)
    queue.push(two)
    queue.push_front(waiting(3, "y", BATCH, length=2))
    assert queue.num_requests == {BATCH: 2, INTERACTIVE: 1}
    assert queue.num_tokens == {BATCH: 7, INTERACTIVE: 7}
    assert one in queue and len(queue) == 3
    queue.remove(one)
    queue.remove(one)
    assert one not in queue and "one" not in queue
    assert queue.num_requests == {BATCH: 1, INTERACTIVE: 1}
    assert queue.num_tokens == {BATCH: 2, INTERACTIVE: 7}


def test_an_empty_queue_has_no_head() -> None:
    with pytest.raises(ValueError):
        WaitingQueue().head  # noqa: B018


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=20), min_size=2, max_size=5),
)
def test_no_backlogged_tenant_is_behind_by_more_than_one_request(lengths: list[list[int]]) -> None:
    queue = WaitingQueue()
    for tenant, its_lengths in enumerate(lengths):
        for place, length in enumerate(its_lengths):
            queue.push(waiting(100 * tenant + place, str(tenant), length=length))
    backlog = {str(tenant): len(its_lengths) for tenant, its_lengths in enumerate(lengths)}
    served = dict.fromkeys(backlog, 0)
    longest = max(map(max, lengths))
    while all(backlog.values()):
        head = admit(queue)
        backlog[head.request.tenant] -= 1
        served[head.request.tenant] += head.num_prompt_tokens
        assert max(served.values()) - min(served.values()) <= longest
    assert len(admitted(queue)) == sum(backlog.values()), "work conserving"


class QueueMachine(RuleBasedStateMachine):
    """For any arrivals, returns, removals and charges: each tenant's groups are in the order of a
    queue of their own, the head is the first of one of them, and it is the first that came if there
    is one tenant."""

    @initialize(num_tenants=st.integers(1, 3), classes=st.sampled_from([1, 2]))
    def start(self, num_tenants: int, classes: int) -> None:
        self.tenants = [str(number) for number in range(num_tenants)]
        self.classes = list(PriorityClass)[:classes]
        self.queue = WaitingQueue({INTERACTIVE: 3})
        self.model: dict[tuple[str, str], OrderedDict[int, SequenceGroup]] = {}
        self.num_pushed = 0

    @rule(data=st.data(), length=st.integers(1, 9), is_first=st.booleans())
    def push(self, data: st.DataObject, length: int, is_first: bool) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        priority = data.draw(st.sampled_from(self.classes))
        self.num_pushed += 1
        one = waiting(self.num_pushed, tenant, priority, length)
        model = self.model.setdefault((priority, tenant), OrderedDict())
        model[one.request_id] = one
        if is_first:
            model.move_to_end(one.request_id, last=False)
            self.queue.push_front(one)
        else:
            self.queue.push(one)

    @precondition(lambda self: len(self.queue))
    @rule()
    def admit(self) -> None:
        self._remove(admit(self.queue))

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.queue)))
        self.queue.remove(one)
        self._remove(one)

    @rule(data=st.data(), num_tokens=st.integers(1, 30))
    def charge(self, data: st.DataObject, num_tokens: int) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        priority = data.draw(st.sampled_from(self.classes))
        self.queue.charge((priority, tenant), num_tokens)

    def _remove(self, one: SequenceGroup) -> None:
        key = one.request.priority_class, one.request.tenant
        del self.model[key][one.request_id]
        if not self.model[key]:
            del self.model[key]

    @invariant()
    def each_tenant_has_a_queue(self) -> None:
        if not hasattr(self, "queue"):
            return
        found: dict[tuple[str, str], list[SequenceGroup]] = {}
        for one in self.queue:
            key = one.request.priority_class, one.request.tenant
            found.setdefault(key, []).append(one)
        assert found == {key: list(model.values()) for key, model in self.model.items()}
        assert len(self.queue) == sum(map(len, found.values()))
        if found:
            assert self.queue.head in [own[0] for own in found.values()]
        if len(found) == 1:
            assert self.queue.head is next(iter(self.queue))


TestQueue = QueueMachine.TestCase
