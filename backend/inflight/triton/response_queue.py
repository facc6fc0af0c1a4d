"""From token events to responses: a response_queue per client's request, and the threads that empty
them.

Sending one response takes about 0.1 ms, in which the sender waits for Triton. So whatever came for
a request in the meantime goes out in its next response: one token each when there is little to do,
more by itself when there is much. Where a later step of an ensemble is the slower one, responses
would pile up before it instead; so a request has only a few on their way there at a time.
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
    """Where a response_queue empties to."""

    def send(self, events: list[TokenEvent], is_final: bool) -> None:
        """Send one response: of one output, or of all of them at their end."""

    def abandon(self) -> None:
        """A response could not be sent: end the request somehow, and do not raise."""


class ResponseQueue:
    """What one client still has to be told of what it asked for, which may be several outputs.

    `post` may be called from any thread; events of an output leave in that order, from one thread
    at a time. The last one leaves once, and nothing after it; an error is the last of all.

    Args:
        sink: takes the events.
        stream: False to keep everything for one response at the end.
        max_undelivered: responses that may be sent but not delivered yet; the last one goes in any
            case. None where nobody reports deliveries.
        num_outputs: that were asked for; each has a request id of its own in the engine.
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
        """Responses up to this position have passed the later step."""
        while self._undelivered and self._undelivered[0] <= position:
            self._undelivered.popleft()
        self._queue()

    def _queue(self) -> None:
        # No lock needed: a sender clears `_queued` before it empties `_pending`, so an event that
        # finds it set is still seen, and one that finds it clear at worst queues an empty
        # response_queue.
        if not self._queued:
            self._queued = True
            self._shard.put(self)

    def flush(self) -> None:
        """Send what is pending, of each output as one event."""
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
            except Exception:  # Triton's: the client gets no more, so its request is given up
                logger.exception("a response could not be sent")
                self.closed = True
                self._sink.abandon()

    def _is_full(self) -> bool:
        return self._max_undelivered is not None and len(self._undelivered) >= self._max_undelivered


class SenderPool:
    """Threads that flush mailboxes. A response_queue belongs to one thread, which keeps its
    order."""

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
        """Send what is pending, then end the threads."""
        for shard in self._shards:
            shard.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _run(self, shard: queue.SimpleQueue[ResponseQueue | None]) -> None:
        while (response_queue := shard.get()) is not None:
            response_queue.flush()


class Sweep:
    """Calls `look` again and again from a thread of its own: at most every `interval` seconds, and
    no more than a tenth of the time."""

    def __init__(self, look: Callable[[], None], interval: float) -> None:
        self._look = look
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        pause = self._interval
        while not self._stopped.wait(pause):
            started = time.monotonic()
            try:
                self._look()
            except Exception:  # logged; a thread that ended here would see no cancel any more
                logger.exception("looking for cancelled requests failed")
            pause = max(self._interval, 9 * (time.monotonic() - started))
