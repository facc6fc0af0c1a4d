"""Sends requests when they are due, whatever the engine does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from inflight.cli.bench.serving.results.records import UNFINISHED, Record
from inflight.cli.bench.serving.results.window import Window
from inflight.cli.bench.serving.workload.lengths import Shape
from inflight.core.request import Request


class Due(NamedTuple):
    """A request of an open loop; due_s: seconds from the start."""

    due_s: float
    shape: Shape


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """
    Attributes:
        planned: the requests, in the order of their times, without end.
        window: requests due in it are measured.
        patience_s: from a number of output tokens to the seconds after which a request is given up.
    """

    planned: Iterator[Due]
    window: Window
    patience_s: Callable[[int], float]


class Sender:
    """A thread beside the engine's, as the one that reads a front's socket in the engine's process:
    requests wait in its inbox until the engine's thread takes them between two steps.

    Args:
        loop: what to send.
        make: makes a request; called before it is due, since it takes time.

    Attributes:
        started: `time.perf_counter()` at the start.
        late_s: of each request: how much later than due it was sent.
        num_sent: requests sent.
        next_due_s: when the next request is due; those before have been sent.
    """

    def __init__(self, loop: OpenLoop, make: Callable[[Shape], Request]) -> None:
        self.started = 0.0
        self.late_s: list[float] = []
        self.num_sent = 0
        self.next_due_s = 0.0
        self._loop = loop
        self._make = make
        self._inbox: deque[tuple[Record, Request]] = deque()
        self._has_mail = threading.Event()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def __enter__(self) -> Sender:
        self.started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> Iterator[tuple[Record, Request]]:
        """Those sent since the last call.

        Raises:
            Exception: whatever `planned` or `make` raised.
        """
        self._has_mail.clear()
        if self._error is not None:
            raise self._error
        while self._inbox:
            yield self._inbox.popleft()

    def wait(self, timeout_s: float) -> None:
        """Until a request is sent, or as long."""
        self._has_mail.wait(timeout_s)

    def _run(self) -> None:
        try:
            for planned in self._loop.planned:
                self.next_due_s = planned.due_s
                request = self._make(planned.shape)
                due = self.started + planned.due_s
                if self._stop.wait(max(0.0, due - time.perf_counter())):
                    return
                self._send(request, planned)
        except Exception as error:  # the thread that measures raises it
            self._error = error
            self._has_mail.set()

    def _send(self, request: Request, planned: Due) -> None:
        due, now = self.started + planned.due_s, time.perf_counter()
        record = Record(
            sent=now,
            num_input_tokens=len(request.prompt_ids),
            error=UNFINISHED,
            due=due,
            give_up=due + self._loop.patience_s(planned.shape.output_len),
            is_measured=self._loop.window.has(planned.due_s),
        )
        self.late_s.append(max(0.0, now - due))
        self._inbox.append((record, request))
        self.num_sent += 1
        self._has_mail.set()
