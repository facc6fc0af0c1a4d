"""The queue of groups that wait for admission: fair between priority classes, then tenants.

Two levels of virtual counters (see `scheduling.virtual_counters`). Priority classes share the
tokens by their weights; within a class its tenants share them equally; within a tenant's queue the
order is that of arrival, and a group that has run before returns to its front. A share that one
does not use goes to the others.

Served tokens are those that are computed for a request by its own doing: the tokens of its prompt
that are not in the prefix cache, and its output. What a preemption makes the engine compute again
is not charged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

from inflight.core.request import PriorityClass
from inflight.core.sequence import SequenceGroup
from inflight.scheduling.virtual_counters import VirtualCounters

_Key = tuple[PriorityClass, str]


class WaitingQueue(Collection[SequenceGroup]):
    """Waiting groups. Iterating over it gives each tenant's in order, one tenant after another.

    Args:
        weights: shares of the priority classes; equal ones by default.

    Attributes:
        num_requests: groups, by priority class.
        num_tokens: prompt tokens of these groups, by priority class.
    """

    def __init__(self, weights: Mapping[PriorityClass, int] | None = None) -> None:
        self.num_requests = dict.fromkeys(PriorityClass, 0)
        self.num_tokens = dict.fromkeys(PriorityClass, 0)
        self._size = 0
        self._queues: dict[_Key, OrderedDict[int, SequenceGroup]] = {}  # none is empty
        self._classes = VirtualCounters(weights)
        self._tenants = {one: VirtualCounters() for one in PriorityClass}
        self._head: SequenceGroup | None = None  # until something changes

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceGroup]:
        for queue in self._queues.values():
            yield from queue.values()

    def __contains__(self, group: object) -> bool:
        if not isinstance(group, SequenceGroup):
            return False
        return group.request_id in self._queues.get(_key(group), ())

    @property
    def head(self) -> SequenceGroup:
        """The group to be admitted next; there must be one. It stays the same until a group comes
        or goes, or tokens are charged."""
        if self._head is None:
            priority = PriorityClass(self._classes.least())
            queue = self._queues[priority, self._tenants[priority].least()]
            self._head = next(iter(queue.values()))
        return self._head

    @property
    def has_choice(self) -> bool:
        """Whether `head` depends on what was charged since it was last known."""
        return self._head is None and len(self._queues) > 1

    def push(self, group: SequenceGroup) -> None:
        """Append a group to its tenant's queue."""
        key = priority, tenant = _key(group)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = OrderedDict()
            self._classes.enter(priority)
            self._tenants[priority].enter(tenant)
        queue[group.request_id] = group
        self._size += 1
        self.num_requests[priority] += 1
        self.num_tokens[priority] += group.num_prompt_tokens
        self._head = None

    def push_front(self, group: SequenceGroup) -> None:
        """Put a group that has run before at the front of its tenant's queue."""
        self.push(group)
        self._queues[_key(group)].move_to_end(group.request_id, last=False)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it is; does nothing if it does not wait."""
        key = priority, tenant = _key(group)
        queue = self._queues.get(key)
        if queue is None or queue.pop(group.request_id, None) is None:
            return
        self._size -= 1
        self.num_requests[priority] -= 1
        self.num_tokens[priority] -= group.num_prompt_tokens
        if not queue:
            del self._queues[key]
            self._tenants[priority].leave(tenant)
            if not self.num_requests[priority]:
                self._classes.leave(priority)
        self._head = None

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        """So many tokens were computed for a group, on account of its class and its tenant."""
        priority, tenant = _key(group)
        self._classes.charge(priority, num_tokens)
        self._tenants[priority].charge(tenant, num_tokens)
        self._head = None


def _key(group: SequenceGroup) -> _Key:
    return group.request.priority_class, group.request.tenant
