"""The queue of groups that wait for admission: fair between priority classes, then tenants.

Two levels of virtual counters (see `scheduling.virtual_counters`). Priority classes share the
tokens by their weights; within a class its tenants share them equally; within a tenant's queue the
order is that of arrival, and a group that has run before returns to its front. A share that one
does not use goes to the others.

Served tokens are those that are computed for a request by its own doing: the tokens of its prompt
that are not in the prefix cache, and its output. What a preemption makes the engine compute again
is not charged.

New requests are refused beyond its limits. Only prompts count as waiting tokens: they are known,
they are what a later request waits for before its own first token, and they take memory. The output
that a request allows is mostly a default, or whatever the context leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping

from inflight.core.request import PriorityClass
from inflight.core.sequence import SequenceGroup
from inflight.errors import CapacityError
from inflight.scheduling.virtual_counters import VirtualCounters

QueueKey = tuple[PriorityClass, str]
"""A tenant in a class."""

QUEUE_LIMITS = ("max_waiting", "max_waiting_tokens")


def key_of(group: SequenceGroup) -> QueueKey:
    """The priority class and tenant that a group is queued under and charged to."""
    return group.request.priority_class, group.request.tenant


class WaitingQueue(Collection[SequenceGroup]):
    """Waiting groups. Iterating over it gives each tenant's in order, one tenant after another.

    Who charges may be late, as long as all is charged before something depends on it: `has_choice`
    says so for `head`, and `starts` for `push` and `push_front`.

    Args:
        weights: shares of the priority classes; equal ones by default.
        max_waiting: maximum groups, preempted ones included, for a new one to be accepted.
        max_waiting_tokens: the same for their prompt tokens; None for no limit.

    Attributes:
        num_requests: groups, by priority class.
        num_tokens: prompt tokens of these groups, by priority class.
        num_refused: requests that `check` refused, by the limit: one of QUEUE_LIMITS.
    """

    def __init__(
        self,
        weights: Mapping[PriorityClass, int] | None = None,
        max_waiting: int = 1024,
        max_waiting_tokens: int | None = None,
    ) -> None:
        self.num_refused = dict.fromkeys(QUEUE_LIMITS, 0)
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self.num_requests = dict.fromkeys(PriorityClass, 0)
        self.num_tokens = dict.fromkeys(PriorityClass, 0)
        self._size = 0
        self._queues: dict[QueueKey, OrderedDict[int, SequenceGroup]] = {}  # none is empty
        self._classes = VirtualCounters(weights)
        self._tenants = {one: VirtualCounters() for one in PriorityClass}
        self._head: SequenceGroup | None = None  # until something changes
        self._first_key: QueueKey | None = None
        self._has_others = False  # whether anyone but the first one was ever here

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceGroup]:
        for queue in self._queues.values():
            yield from queue.values()

    def __contains__(self, group: object) -> bool:
        if not isinstance(group, SequenceGroup):
            return False
        return group.request_id in self._queues.get(key_of(group), ())

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

    def starts(self, group: SequenceGroup) -> bool:
        """Whether a group would be the first in its queue, which then begins where others are by
        what they were charged. There may be no others."""
        key = key_of(group)
        return key not in self._queues and (self._has_others or key != self._first_key)

    def check(self, group: SequenceGroup, retry_after_s: int) -> None:
        """Check the limits for a new request.

        Args:
            group: the request's.
            retry_after_s: what a refusal tells the client.

        Raises:
            CapacityError: too many requests or tokens are waiting. A prompt that exceeds the limit
                by itself is accepted if nothing waits: later would be no better.
        """
        num_waiting = len(self)
        num_tokens = sum(self.num_tokens.values())
        limit = self._max_waiting_tokens
        if num_waiting >= self._max_waiting:
            self.num_refused["max_waiting"] += 1
            raise CapacityError(
                f"{num_waiting} requests are waiting (max_waiting is {self._max_waiting}); "
                f"retry in {retry_after_s} s"
            )
        if limit is not None and num_waiting and num_tokens + group.num_prompt_tokens > limit:
            self.num_refused["max_waiting_tokens"] += 1
            raise CapacityError(
                f"{num_tokens} prompt tokens are waiting (max_waiting_tokens is {limit}) and this "
                f"prompt has {group.num_prompt_tokens}; retry in {retry_after_s} s"
            )

    def push(self, group: SequenceGroup) -> None:
        """Append a group to its tenant's queue."""
        key = priority, tenant = key_of(group)
        queue = self._queues.get(key)
        if queue is None:
            self._first_key = self._first_key or key
            self._has_others = self._has_others or key != self._first_key
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
        self._queues[key_of(group)].move_to_end(group.request_id, last=False)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it is; does nothing if it does not wait."""
        key = priority, tenant = key_of(group)
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

    def charge(self, key: QueueKey, num_tokens: int) -> None:
        """So many tokens were computed for groups of this class and tenant."""
        priority, tenant = key
        self._classes.charge(priority, num_tokens)
        self._tenants[priority].charge(tenant, num_tokens)
        self._head = None
