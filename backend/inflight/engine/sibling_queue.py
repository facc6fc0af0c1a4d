"""Requests that wait for another one with the same prompt, to find it in the prefix cache."""

from __future__ import annotations

from collections.abc import Container, Iterable

from inflight.core.batch import Committed
from inflight.core.sequence import SequenceGroup, Status


class SiblingQueue:
    """Holds requests back until their sibling has its first token, or has ended."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[SequenceGroup]] = {}  # by the request that they wait for

    def __len__(self) -> int:
        """Requests that others wait for."""
        return len(self._waiting)

    def add(self, group: SequenceGroup, first: SequenceGroup) -> None:
        """Hold a request until another one's prompt is computed."""
        self._waiting.setdefault(first.request_id, []).append(group)

    def pop_orphans(self, known_ids: Container[int]) -> list[SequenceGroup]:
        """Requests that waited for one that has ended."""
        return self._pop([first for first in self._waiting if first not in known_ids])

    def pop_ready(self, committed: Iterable[Committed]) -> list[SequenceGroup]:
        """Requests whose prompt has just been computed."""
        if not self._waiting:
            return []
        return self._pop(
            each.sequence.request_id
            for each in committed
            if each.token_ids or each.sequence.beam_of is not None
        )

    def _pop(self, firsts: Iterable[int]) -> list[SequenceGroup]:
        return [
            group
            for first in firsts
            for group in self._waiting.pop(first, ())
            if group.status is not Status.FINISHED
        ]
