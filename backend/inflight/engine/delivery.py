"""Whose consumer has gone: told from what is no longer delivered.

Triton tells nobody when a client cancels an ensemble request: the model that streams runs on, and
the core drops its responses on their way. So the last step of the ensemble acknowledges what passed
through it, and a request whose responses stay unacknowledged for too long is suspected. The engine
then sets it aside, which is cheap to take back; a late acknowledgement brings it back, and lasting
silence ends it.

What "too long" means follows the load. Under load responses are coalesced and queue up, so the
measure is the delay that acknowledged responses have had lately. And silence counts for little
while nobody else has been was_acknowledged either: then the way is blocked, not one consumer gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from inflight.core.request import TokenEvent

# Below this, a pause is a hiccup of an operating system: a garbage collection, a scheduler's slice.
MIN_PATIENCE = 0.020
# An emission is overdue after this many steps and delays. One step: an acknowledgement is looked
# for between two steps, so it is seen up to one late. Four delays: the mean of a skewed
# distribution has to stand for its tail.
PATIENCE_STEPS = 1.0
PATIENCE_LATENCIES = 4.0
# The first response of a request travels cold paths: connections, tokenizer tables, pages not
# touched yet.
GRACE = 1.0
# When all fall silent at once, the cause may be a pause of the server as well.
STALL_GRACE = 0.15
# Each time a request proves to have been suspected wrongly, its patience doubles, up to 2**this.
MAX_DOUBLINGS = 6
# Silence of this length is final, in seconds: longer than any pause that a server lives through.
GIVE_UP_AFTER = 5.0
# How the smoothed times follow: half-way up at once, down with this time constant in seconds.
# A patience that is too long wastes a few steps; one that is too short disturbs healthy streams.
RISE = 0.5
DECAY = 0.5
# Emissions remembered per request. Beyond it the newest ones are taken together.
MAX_PENDING = 64


class _Smoothed:
    """A mean that rises fast and falls slowly: it stands near the upper end of what was seen."""

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
    """What is on its way to one consumer."""

    __slots__ = ("num_returns", "pending", "position", "suspended_at", "was_acknowledged")

    def __init__(self) -> None:
        self.pending: deque[tuple[int, float]] = deque()  # (position, emitted at), oldest first
        self.position = 0  # acknowledged up to here
        self.was_acknowledged = False  # whether anything was ever acknowledged
        self.suspended_at: float | None = None
        self.num_returns = 0


class DeliveryWatch:
    """Follows the requests that a detokenizer acknowledges. Times are seconds of one clock.

    It is soonest right when it is handed the acknowledgements that have arrived before it is asked
    what is overdue, but it also bears with one step between the two.

    Args:
        give_up_after: seconds of silence after which a suspended request is abandoned.

    Attributes:
        num_suspicions: requests ever reported as overdue.
        num_returns: how many of these came back.
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
        """A step of the engine took this many seconds."""
        self._last_step = duration
        self._time_in_steps += duration
        self._step_time.add(duration, self._time_in_steps)

    def watch(self, request_id: int) -> None:
        """From now on `record_events` follows a request."""
        self._watched.add(request_id)

    def record_events(self, events: Iterable[TokenEvent], now: float) -> None:
        """Events were sent on their way."""
        watched = self._watched
        if watched:
            for event in events:
                if event.request_id in watched and event.token_ids:
                    self.emitted(event.request_id, event.position, now)

    def emitted(self, request_id: int, position: int, now: float) -> None:
        """Tokens up to `position` of a request were sent on their way."""
        stream = self._streams.get(request_id)
        if stream is None:
            stream = self._streams[request_id] = _Stream()
        if position <= stream.position:
            return  # acknowledged before we were told of it
        if len(stream.pending) >= MAX_PENDING:
            stream.pending.pop()
        stream.pending.append((position, now))

    def delivered(self, request_id: int, position: int, now: float) -> bool:
        """Everything up to `position` of a request was handed on.

        Returns:
            Whether this brings a suspended request back. Only news do: not a repeated
            acknowledgement, and not one of a request that is not watched.
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
        """Forget a request; does nothing to one that is not watched."""
        self._watched.discard(request_id)
        self._streams.pop(request_id, None)

    def overdue(self, now: float) -> list[int]:
        """Requests to suspend: their consumers have been silent for too long. Tells each once."""
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
        """Requests to cancel: suspended for so long that nobody will come back. Forgets them."""
        found = [
            request_id
            for request_id, stream in self._streams.items()
            if stream.suspended_at is not None and now - stream.suspended_at > self._give_up_after
        ]
        for request_id in found:
            del self._streams[request_id]
        return found

    def _learn(self, stream: _Stream, now: float) -> None:
        # The oldest of the emissions that one response carried waited longest: that is the delay
        # which `overdue` has to bear with. It may have arrived at the start of the last step.
        oldest = newest = stream.pending.popleft()[1]
        while stream.pending and stream.pending[0][0] <= stream.position:
            newest = stream.pending.popleft()[1]
        if newest > self._latest_acknowledged:
            self._latest_acknowledged = newest
        if stream.was_acknowledged or self._latency.num_samples == 0:
            self._latency.add(max(0.0, now - oldest - self._last_step), now)
