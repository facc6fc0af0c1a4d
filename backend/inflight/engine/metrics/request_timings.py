"""Where the time of a request goes, for those that enable `return_timing`.

Costs nothing while no such request is in the engine; otherwise one pass over the batch per step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inflight.core.batch import Batch, Chunk
from inflight.core.request import RequestTiming, TokenEvent
from inflight.core.sequence import Sequence, SequenceGroup, Status

_QUEUE, _PREFILL, _DECODE = "queue_s", "prefill_s", "decode_s"
_PREEMPTED, _SUSPENDED = "preempted_s", "suspended_s"


class _Timed:
    """A request and its times so far.

    Attributes:
        seconds: by phase; they add up to the time from `arrived` to `until`.
        kv_wait_s: of the queue's seconds, those in which the queue waited for KV blocks.
        waits_for_blocks: whether it does, as of the last step planned.
        interruption: the phase that lasts until its next token; None for none.
        plain_s, mixed_s: seconds of each of its decode steps without and with prompts of others.
        joules: None without a meter.
    """

    def __init__(self, group: SequenceGroup, arrived: float) -> None:
        self.group = group
        self.arrived = arrived
        self.until = arrived
        self.seconds = dict.fromkeys((_QUEUE, _PREFILL, _DECODE, _PREEMPTED, _SUSPENDED), 0.0)
        self.kv_wait_s = 0.0
        self.waits_for_blocks = False
        self.has_run = False
        self.interruption: str | None = None
        self.num_preemptions = 0
        self.num_tokens = 0
        self.first_token: float | None = None
        self.last_token = arrived
        self.num_prefill_steps = 0
        self.plain_s: list[float] = []
        self.mixed_s: list[float] = []
        self.joules: float | None = None

    @property
    def phase(self) -> str:
        if not self.has_run:
            return _QUEUE
        if self.interruption is not None:
            return self.interruption
        return _PREFILL if self.first_token is None else _DECODE

    def account(self, now: float) -> None:
        """Add the time since the last call to the phase of that time."""
        seconds, self.until = now - self.until, now
        self.seconds[self.phase] += seconds
        if self.waits_for_blocks:
            self.kv_wait_s += seconds

    def result(self) -> RequestTiming:
        num_tokens, first = self.num_tokens, self.first_token
        sequences = [one for one in self.group.members if isinstance(one, Sequence)]
        return RequestTiming(
            **{phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
            kv_wait_s=round(self.kv_wait_s, 6),
            ttft_s=None if first is None else round(first - self.arrived, 6),
            mean_itl_s=None
            if first is None or num_tokens < 2
            else round((self.last_token - first) / (num_tokens - 1), 6),
            prefill_interference_s=_excess(self.mixed_s, self.plain_s),
            num_prefill_steps=self.num_prefill_steps,
            num_decode_steps=len(self.plain_s) + len(self.mixed_s),
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.group.num_cached_tokens,
            num_drafted=sum(one.num_drafted for one in sequences),
            num_accepted=sum(one.num_accepted for one in sequences),
            energy_j=None if self.joules is None else round(self.joules, 6),
        )


class RequestTimings:
    """The requests in the engine with `return_timing`; false if there are none.

    Args:
        watts: the GPU's power now; None if it is not known.
    """

    def __init__(self, watts: Callable[[], float | None] = lambda: None) -> None:
        self._timed: dict[int, _Timed] = {}
        self._watts = watts

    def __len__(self) -> int:
        return len(self._timed)

    def add(self, group: SequenceGroup, arrived: float) -> None:
        """A request has been accepted; arrived: in seconds of the engine's clock."""
        self._timed[group.request_id] = _Timed(group, arrived)

    def forget(self, request_id: int) -> None:
        """A request has failed; does nothing for one that is unknown."""
        self._timed.pop(request_id, None)

    def scheduled(self, batch: Batch, lacks_blocks: bool, now: float) -> None:
        """A step has been planned.

        Args:
            lacks_blocks: whether the head of the queue waits for KV blocks.
        """
        planned = {chunk.sequence.group.request_id for chunk in batch.chunks}
        for request_id, timed in self._timed.items():
            group = timed.group
            timed.account(now)
            timed.has_run |= request_id in planned
            timed.waits_for_blocks = (
                lacks_blocks and not timed.has_run and group.status is Status.WAITING
            )
            if group.num_preemptions > timed.num_preemptions:
                timed.num_preemptions = group.num_preemptions
                timed.interruption = _PREEMPTED

    def suspended(self, request_id: int, now: float) -> None:
        """A request was suspended. It may be resumed before another step is planned."""
        timed = self._timed.get(request_id)
        if timed is not None:
            timed.account(now)
            timed.interruption = _SUSPENDED

    def processed(self, batch: Batch, now: float, seconds: float) -> None:
        """A step has been committed, after so many seconds of its own."""
        own: dict[int, list[Chunk]] = {}
        for chunk in batch.chunks:
            request_id = chunk.sequence.group.request_id
            if request_id in self._timed:
                own.setdefault(request_id, []).append(chunk)
        # Prompts come after decodes.
        is_mixed = bool(batch.chunks) and _is_prefill(batch.chunks[-1])
        watts = self._watts() if own else None
        for request_id, timed in self._timed.items():
            timed.account(now)
            chunks = own.get(request_id, [])
            if watts is not None and chunks:
                share = sum(chunk.length for chunk in chunks) / batch.num_tokens
                timed.joules = (timed.joules or 0.0) + watts * seconds * share
            if any(map(_is_prefill, chunks)):
                timed.num_prefill_steps += 1
            elif chunks:
                (timed.mixed_s if is_mixed else timed.plain_s).append(seconds)
            self._count_tokens(timed, now)

    def attach(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """The events, with the times of each request that has ended."""
        return [
            msgspec.structs.replace(event, timing=self._timed.pop(event.request_id).result())
            if event.is_last and event.request_id in self._timed
            else event
            for event in events
        ]

    def _count_tokens(self, timed: _Timed, now: float) -> None:
        num_tokens = timed.group.num_output_tokens
        if num_tokens > timed.num_tokens:
            timed.num_tokens = num_tokens
            timed.last_token = now
            timed.interruption = None
            if timed.first_token is None:
                timed.first_token = now


def _is_prefill(chunk: Chunk) -> bool:
    return not chunk.samples or chunk.length > 1 + chunk.num_drafts


def _excess(mixed_s: list[float], plain_s: list[float]) -> float | None:
    """Seconds by which steps exceed plain ones of the mean length; None if there are none."""
    if not mixed_s:
        return 0.0
    if not plain_s:
        return None
    plain = sum(plain_s) / len(plain_s)
    return round(sum(max(0.0, seconds - plain) for seconds in mixed_s), 6)
