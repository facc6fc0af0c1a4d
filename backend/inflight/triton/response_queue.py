"""From token events to responses: a queue per client request, and the threads that flush them.

Sending a response takes about 0.1 ms, during which the sender waits for Triton. So events that
arrive meanwhile are coalesced into the next response: one token per response under low load, more
under high load. If a later step of an ensemble is the bottleneck, responses would queue up there
instead; so a request has only a few undelivered responses at a time.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from inflight.core.request import TokenEvent
from inflight.triton.protocol import merge

logger = logging.getLogger(__name__)


class ResponseSink(Protocol):
    """Where a response queue flushes to."""

    def send(self, events: list[TokenEvent], is_final: bool) -> None:
        """Send one response: of one output, or of all outputs at the end."""

    def abandon(self) -> None:
        """A response could not be sent: end the request; must not raise."""


class ResponseQueue:
    """The pending events of one client request, which may have several outputs.

    `post` may be called from any thread; events of an output are sent in that order, from one
    thread at a time. The final one is sent once, and nothing after it; an error is final for all.

    Args:
        sink: receives the events.
        stream: False to send everything in one response at the end.
        max_undelivered: responses that may be sent but not delivered yet; the final one is always
            sent. None if deliveries are not reported.
        num_outputs: requested outputs; each has its own request id in the engine.
    """

    __slots__ = (
        "_ended",
        "_held",
        "_max_undelivered",
        "_num_outputs",
        "_pending",
        "_queued",
        "_shard",
        "_sink",
        "_stream",
        "_undelivered",
        "closed",
        "lock",
    )

    def __init__(
        self,
        sink: ResponseSink,
        stream: bool,
        shard: queue.SimpleQueue[ResponseQueue | None],
        max_undelivered: int | None = None,
        num_outputs: int = 1,
    ) -> None:
        self._sink = sink
        self._stream = stream
        self._num_outputs = num_outputs
        self._shard = shard
        self._pending: deque[TokenEvent] = deque()
        self._queued = False
        self._held: dict[int, TokenEvent] = {}  # by output
        self._ended: set[int] = set()
        self._max_undelivered = max_undelivered
        self._undelivered: deque[int] = deque()  # positions of the responses
        self.closed = False
        # Held while something is sent: afterwards a closed request's sender must not be touched.
        self.lock = threading.Lock()

    def post(self, event: TokenEvent) -> None:
        self._pending.append(event)
        self._queue()

    def delivered(self, position: int) -> None:
        """Responses up to this position have been delivered."""
        while self._undelivered and self._undelivered[0] <= position:
            self._undelivered.popleft()
        self._queue()

    def _queue(self) -> None:
        # No lock needed: a sender clears `_queued` before it drains `_pending`, so an event that
        # finds it set is still seen, and one that finds it clear at worst queues an empty queue.
        if not self._queued:
            self._queued = True
            self._shard.put(self)

    def flush(self) -> None:
        """Send pending events, coalesced per output."""
        self._queued = False
        while self._pending:
            later = self._pending.popleft()
            output = later.request_id
            if output in self._ended:
                continue
            earlier = self._held.get(output)
            self._held[output] = later if earlier is None else merge(earlier, later)
            if later.is_last:
                self._ended.add(output)
        held = list(self._held.values())
        failed = next((event for event in held if event.error is not None), None)
        if failed is not None:
            self._send([failed], True)
        elif not self._stream:
            if len(self._ended) == self._num_outputs:
                self._send(held, True)
        else:
            for event in held:
                if event.is_last or not self._is_full():
                    del self._held[event.request_id]
                    self._send([event], len(self._ended) == self._num_outputs and not self._held)

    def _send(self, events: list[TokenEvent], is_final: bool) -> None:
        if self.closed:
            return
        if self._max_undelivered is not None:
            self._undelivered.append(events[0].position)
        with self.lock:
            self.closed = is_final
            try:
                self._sink.send(events, is_final)
            except Exception:  # Triton's: the client gets nothing more, so cancel its request
                logger.exception("a response could not be sent")
                self.closed = True
                self._sink.abandon()

    def _is_full(self) -> bool:
        return self._max_undelivered is not None and len(self._undelivered) >= self._max_undelivered


class SenderPool:
    """Threads that flush response queues. Each queue is pinned to one thread, which keeps order."""

    def __init__(self, num_threads: int) -> None:
        self._shards: list[queue.SimpleQueue[ResponseQueue | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._next_shard = itertools.cycle(self._shards)
        self._threads = [
            threading.Thread(target=self._run, args=(shard,), name=f"send-{i}", daemon=True)
            for i, shard in enumerate(self._shards)
        ]
        for thread in self._threads:
            thread.start()

    def response_queue(
        self,
        sink: ResponseSink,
        stream: bool,
        max_undelivered: int | None = None,
        num_outputs: int = 1,
    ) -> ResponseQueue:
        return ResponseQueue(sink, stream, next(self._next_shard), max_undelivered, num_outputs)

    def close(self) -> None:
        """Send pending events, then stop the threads."""
        for shard in self._shards:
            shard.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _run(self, shard: queue.SimpleQueue[ResponseQueue | None]) -> None:
        while (response_queue := shard.get()) is not None:
            response_queue.flush()


class Sweep:
    """Calls `look` periodically on its own thread: at most every `interval` seconds, and during at
    most a tenth of the time.

    Args:
        look: returns whether to look again; otherwise it is called after the next `wake`.
        interval: seconds.
    """

    def __init__(self, look: Callable[[], bool], interval: float) -> None:
        self._look = look
        self._interval = interval
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to look at."""
        self._woken.set()

    def close(self) -> None:
        self._stopped.set()
        self._woken.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        pause = self._interval
        while not self._stopped.wait(pause):
            self._woken.clear()  # before looking: what comes meanwhile is looked at next time
            started = time.monotonic()
            is_busy = True
            try:
                is_busy = self._look()
            except Exception:  # logged; the thread must survive to see later cancellations
                logger.exception("looking for cancelled requests failed")
            pause = max(self._interval, 9 * (time.monotonic() - started))
            if not is_busy:
                self._woken.wait()
