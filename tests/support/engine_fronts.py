"""Fronts with a fake engine, for tests of their roles."""

from __future__ import annotations

from typing import Any

from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.ipc.frames import Welcome


class FakeEngine:
    """Holds what was submitted and cancelled; `say` reports tokens."""

    def __init__(self, on_events: Any) -> None:
        self.welcome = Welcome("fake", 49152, 64, 8, 16, [2], 2048, True)
        self.on_events = on_events
        self.submitted: list[Request] = []
        self.cancelled: list[int] = []
        self._num_ids = 0

    def new_request_id(self) -> int:
        self._num_ids += 1
        return 1 << 32 | self._num_ids

    def submit(self, request: Request) -> None:
        self.submitted.append(request)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.on_events([TokenEvent(request_id, finish_reason=FinishReason.CANCELLED)])

    def close(self) -> None:
        pass

    def say(self, ids: list[int], index: int = -1, **fields: Any) -> None:
        self.on_events([TokenEvent(self.submitted[index].request_id, ids, **fields)])


def attached(engines: list[FakeEngine]) -> Any:
    """A substitute for `attach_front` that adds to `engines`."""

    def attach_front(
        directory: Any, owner: Any, on_events: Any, on_lost: Any, on_delivered: Any
    ) -> FakeEngine:
        engines.append(FakeEngine(on_events))
        return engines[-1]

    return attach_front
