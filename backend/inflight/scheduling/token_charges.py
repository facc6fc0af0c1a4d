"""Charges classes and tenants for the tokens that are computed for their requests.

The queue's order depends on these charges where groups arrive and where they are admitted. Output
is charged there, for all running groups at once: a pass over them is nothing for every step.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.core.sequence import SequenceGroup
from inflight.scheduling.waiting_queue import QueueKey, WaitingQueue, key_of


class TokenCharges:
    """What was charged for each known group that has run, so that nothing is charged twice.

    Args:
        queue: is charged.
        running: the running groups, by request; a live view.

    Attributes:
        is_complete: whether all output is charged. Who commits a step sets it to False.
    """

    def __init__(self, queue: WaitingQueue, running: Mapping[int, SequenceGroup]) -> None:
        self.is_complete = True
        self._queue = queue
        self._running = running
        self._charged: dict[int, int] = {}  # output tokens

    def __contains__(self, group: SequenceGroup) -> bool:
        """Whether a group has run before."""
        return group.request_id in self._charged

    def begin(self, group: SequenceGroup) -> None:
        """A group runs for the first time: charge for its prompt, without what was cached."""
        self._charged[group.request_id] = 0
        self._queue.charge(key_of(group), group.num_prompt_tokens - group.num_cached_tokens)

    def charge_before(self, group: SequenceGroup) -> None:
        """Charge for all output, if it matters to a group that is about to wait."""
        if self._queue.starts(group):
            self.charge_output()

    def charge_output(self) -> None:
        """Charge for the output of all running groups since the last time."""
        if self.is_complete:
            return
        self.is_complete = True
        tokens: dict[QueueKey, int] = {}
        charged = self._charged
        for request_id, group in self._running.items():
            num_tokens = _num_output_tokens(group)
            before = charged[request_id]
            if num_tokens > before:
                charged[request_id] = num_tokens
                key = key_of(group)
                tokens[key] = tokens.get(key, 0) + num_tokens - before
        for key, count in tokens.items():
            self._queue.charge(key, count)

    def charge_rest(self, group: SequenceGroup) -> None:
        """A group runs no longer: charge for its output since the last time."""
        num_tokens = _num_output_tokens(group)
        self._queue.charge(key_of(group), num_tokens - self._charged[group.request_id])
        self._charged[group.request_id] = num_tokens

    def forget(self, group: SequenceGroup) -> None:
        """A group has ended, whether it ever ran or not."""
        self._charged.pop(group.request_id, None)


def _num_output_tokens(group: SequenceGroup) -> int:
    """Committed output tokens that were computed: for a search, whose output is known only at its
    end, of all beams."""
    return group.num_output_tokens or group.num_steps * group.width
