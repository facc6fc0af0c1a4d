"""Detects lost consumers by missing delivery acknowledgements.

Triton does not report the cancellation of an ensemble request to its running steps: the streaming
model continues, and the core drops its responses. So the ensemble's last step acknowledges each
response, and a request whose responses remain unacknowledged for too long is suspected. The engine
suspends it, which is cheap to undo; a late acknowledgement resumes it, lasting silence cancels it.

"Too long" adapts to the load. Under load responses are coalesced and queued, so the measure is the
recent delay of acknowledged responses. While no other request is acknowledged either, silence means
little: the whole path is blocked rather than one consumer lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from inflight.core.request import TokenEvent

# Shorter pauses are noise: garbage collection, a scheduler's time slice.
MIN_PATIENCE = 0.020
# An emission is overdue after so many steps plus so many latencies. One step: acknowledgements are
# read between steps, so up to one step late. Four latencies: a smoothed mean has to cover the tail
# of a skewed distribution.
PATIENCE_STEPS = 1.0
PATIENCE_LATENCIES = 4.0
# A request's first response takes cold paths: connections, tokenizer tables, untouched pages.
GRACE = 1.0
# When all requests fall silent at once, the server itself may have paused.
STALL_GRACE = 0.15
# Each wrong suspicion doubles a request's patience, up to 2**this.
MAX_DOUBLINGS = 6
# Silence of this many seconds is final: longer than any pause that a server survives.
GIVE_UP_AFTER = 5.0
# Smoothing: half-way up at once, down with this time constant in seconds. Too much patience wastes
# a few steps; too little suspends healthy streams.
RISE = 0.5
DECAY = 0.5
# Emissions tracked per request; beyond it the newest ones are merged.
MAX_PENDING = 64


class _Smoothed:
    """A mean that rises fast and decays slowly, near the upper end of the recent samples."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num_samples = 0
        self._updated = 0.0

    def add(self, sample: float, now: float) -> None:
        if self.num_samples == 0:
            self.value = sample
        elif sample > self.value:
            self.value += RISE * (sample - self.value)
        elif now > self._updated:
            # By time, not by samples: a hundred acknowledgements in one frame are one observation.
            kept = math.exp((self._updated - now) / DECAY)
            self.value = sample + (self.value - sample) * kept
        self.num_samples += 1
        self._updated = now


class _Stream:
    """Unacknowledged emissions to one consumer."""

    __slots__ = ("num_returns", "pending", "position", "suspended_at", "was_acknowledged")

    def __init__(self) -> None:
        self.pending: deque[tuple[int, float]] = deque()  # (position, emitted at), oldest first
        self.position = 0  # acknowledged up to here
        self.was_acknowledged = False  # whether anything was ever acknowledged
        self.suspended_at: float | None = None
        self.num_returns = 0


class DeliveryWatch:
    """Tracks the requests whose detokenizer acknowledges delivery. Times are seconds of one clock.

    It is most precise if acknowledgements that have arrived are recorded before `overdue` is
    called, but tolerates one step between the two.

    Args:
        give_up_after: seconds of silence after which a suspended request is abandoned.

    Attributes:
        num_suspicions: requests ever reported as overdue.
        num_returns: how many of these resumed.
    """

    def __init__(self, give_up_after: float = GIVE_UP_AFTER) -> None:
        self.num_suspicions = 0
        self.num_returns = 0
        self._give_up_after = give_up_after
        self._watched: set[int] = set()
        self._streams: dict[int, _Stream] = {}
        self._step_time = _Smoothed()
        self._last_step = 0.0
        self._latency = _Smoothed()
        self._latest_acknowledged = -math.inf  # when the newest acknowledged emission was made
        self._time_in_steps = 0.0  # so that pauses without work forget nothing

    @property
    def patience(self) -> float:
        """Seconds for which an emission may stay unacknowledged."""
        return max(
            MIN_PATIENCE,
            PATIENCE_STEPS * self._step_time.value + PATIENCE_LATENCIES * self._latency.value,
        )

    def record_step(self, duration: float) -> None:
        """Record the duration of a step in seconds."""
        self._last_step = duration
        self._time_in_steps += duration
        self._step_time.add(duration, self._time_in_steps)

    def watch(self, request_id: int) -> None:
        """Start to track a request in `record_events`."""
        self._watched.add(request_id)

    def record_events(self, events: Iterable[TokenEvent], now: float) -> None:
        """Record sent events."""
        watched = self._watched
        if watched:
            for event in events:
                if event.request_id in watched and event.token_ids:
                    self.emitted(event.request_id, event.position, now)

    def emitted(self, request_id: int, position: int, now: float) -> None:
        """Record that tokens up to `position` of a request were sent."""
        stream = self._streams.get(request_id)
        if stream is None:
            stream = self._streams[request_id] = _Stream()
        if position <= stream.position:
            return  # acknowledged already
        if len(stream.pending) >= MAX_PENDING:
            stream.pending.pop()
        stream.pending.append((position, now))

    def delivered(self, request_id: int, position: int, now: float) -> bool:
        """Record that everything up to `position` of a request was delivered.

        Returns:
            Whether this resumes a suspended request: only a new acknowledgement does, of a tracked
            request.
        """
        stream = self._streams.get(request_id)
        if stream is None or position <= stream.position:
            return False
        stream.position = position
        if stream.pending and stream.pending[0][0] <= position:
            self._learn(stream, now)
        stream.was_acknowledged = True
        if stream.suspended_at is None:
            return False
        stream.suspended_at = None
        stream.num_returns += 1
        self.num_returns += 1
        return True

    def finished(self, request_id: int) -> None:
        """Stop tracking a request; no-op for one that is not tracked."""
        self._watched.discard(request_id)
        self._streams.pop(request_id, None)

    def overdue(self, now: float) -> list[int]:
        """Requests to suspend: unacknowledged for too long. Returns each once."""
        usual = self.patience
        waiting = [
            (request_id, stream, stream.pending[0][1])
            for request_id, stream in self._streams.items()
            if stream.pending and stream.suspended_at is None
        ]
        found = []
        for request_id, stream, emitted_at in waiting:
            if now - emitted_at <= usual:
                continue
            patience = usual * 2 ** min(stream.num_returns, MAX_DOUBLINGS)
            overtaken = self._latest_acknowledged > emitted_at
            if not stream.was_acknowledged:
                patience = max(patience, GRACE)
            elif len(waiting) > 1 and not overtaken:
                patience = max(patience, STALL_GRACE)
            if now - emitted_at > patience:
                found.append(request_id)
        for request_id in found:
            self._streams[request_id].suspended_at = now
        self.num_suspicions += len(found)
        return found

    def abandoned(self, now: float) -> list[int]:
        """Requests to cancel: suspended for give_up_after seconds. Stops tracking them."""
        found = [
            request_id
            for request_id, stream in self._streams.items()
            if stream.suspended_at is not None and now - stream.suspended_at > self._give_up_after
        ]
        for request_id in found:
            del self._streams[request_id]
        return found

    def _learn(self, stream: _Stream, now: float) -> None:
        # The oldest emission in a coalesced response waited longest: that is the latency which
        # `overdue` has to tolerate. The acknowledgement may have arrived at the last step's start.
        oldest = newest = stream.pending.popleft()[1]
        while stream.pending and stream.pending[0][0] <= stream.position:
            newest = stream.pending.popleft()[1]
        if newest > self._latest_acknowledged:
            self._latest_acknowledged = newest
        if stream.was_acknowledged or self._latency.num_samples == 0:
            self._latency.add(max(0.0, now - oldest - self._last_step), now)
