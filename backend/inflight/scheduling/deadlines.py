"""Times by which requests must be done. No clock: the caller says what time it is."""

from __future__ import annotations

import heapq


class Deadlines:
    """A deadline for each of some requests. All times are in seconds of one clock."""

    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}  # by request id
        self._heap: list[tuple[float, int]] = []  # with entries of requests that were removed

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request_id: int, deadline: float) -> None:
        """Set a request's deadline. Ids are never used again."""
        self._deadlines[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))

    def remove(self, request_id: int) -> None:
        """The request has no deadline any more; does nothing if it had none."""
        if self._deadlines.pop(request_id, None) is None:
            return
        # Most requests end long before their deadline: their entries are not kept until then.
        if len(self._heap) > 64 + 2 * len(self._deadlines):
            self._heap = [(deadline, one) for one, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def pop_missed(self, now: float) -> list[int]:
        """Remove the requests whose deadline is `now` or before; the earliest comes first."""
        missed = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if self._deadlines.pop(request_id, None) is not None:
                missed.append(request_id)
        return missed
