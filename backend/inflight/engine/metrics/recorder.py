"""Records what an engine does. Called by the engine's loop, so its cost counts.

A step costs one pass over the sequences that got tokens, in C, and one observation for each
distinct time of their previous tokens: for most steps one. Everything else is done once per
request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from inflight.core.batch import Batch, Committed
from inflight.core.request import FinishReason
from inflight.core.sequence import SequenceGroup
from inflight.engine.metrics.families import (
    BY_STEM,
    DEADLINE_STATES,
    ENGINE,
    ERROR_KINDS,
    FINISHED_REASONS,
    FRONT,
    PHASES,
    QUEUED,
    STARTED,
)
from inflight.engine.metrics.histogram import Histogram
from inflight.engine.metrics.snapshot import Metrics, flat
from inflight.engine.stats import Stats
from inflight.engine.token_counts import TokenCounts
from inflight.errors import EngineError

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class _Request:
    """Times of one request, in seconds.

    Attributes:
        arrived: at the front, or else at the engine.
        scheduled: of its first step; None before.
        first_token: of its first token; None before.
        num_beam_tokens: output tokens of a beam search, at its end.
    """

    __slots__ = ("arrived", "first_token", "num_beam_tokens", "scheduled")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.num_beam_tokens = 0


class Recorder:
    """Counts and measures for one engine. All times are in seconds of the engine's clock.

    Args:
        max_num_seqs: sequences that can run at a time.
        block_size: tokens per kernel block.
        enable_prefix_caching: whether prompts are looked up in the prefix cache.
    """

    def __init__(self, max_num_seqs: int, block_size: int, enable_prefix_caching: bool) -> None:
        self._engine = time.time_ns()
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._requests: dict[int, _Request] = {}
        self._last_token: dict[int, float] = {}  # of those that have tokens, by request id
        self._num_prompt_tokens = 0  # of admitted prompts, at the last step
        self._num_finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._num_failed = dict.fromkeys(ERROR_KINDS, 0)
        self._num_deadline_misses = dict.fromkeys(DEADLINE_STATES, 0)
        self._num_queue_timeouts = 0
        self._num_refused = {by: dict.fromkeys(ERROR_KINDS, 0) for by in (ENGINE, FRONT)}
        self._histograms = {
            stem: [Histogram(family.bounds) for _ in family.values]
            for stem, family in BY_STEM.items()
            if family.kind == "histogram"
        }
        (self._first_token_s,) = self._histograms["time_to_first_token_seconds"]
        (self._token_s,) = self._histograms["inter_token_latency_seconds"]
        (self._step_tokens,) = self._histograms["iteration_tokens_total"]
        self._decode_s, self._prefill_s = (
            self._histograms["step_seconds"][PHASES.index(phase)] for phase in PHASES
        )

    def submitted(self, request_id: int, arrived: float) -> None:
        """A request has been accepted."""
        self._requests[request_id] = _Request(arrived)

    def refused(self, kind: str) -> None:
        """A request has not been accepted; kind: of the error."""
        self._num_refused[ENGINE][_known(kind)] += 1

    def missed_deadline(self, request_id: int) -> None:
        """A request's deadline has passed."""
        request = self._requests.get(request_id)
        has_started = request is not None and request.scheduled is not None
        self._num_deadline_misses[STARTED if has_started else QUEUED] += 1

    def timed_out(self) -> None:
        """A request was queued for too long."""
        self._num_queue_timeouts += 1

    def refused_by_front(self, counts: Mapping[str, int]) -> None:
        """A front has refused so many requests, by kind of error."""
        for kind, count in counts.items():
            self._num_refused[FRONT][_known(kind)] += max(0, count)

    def scheduled(self, batch: Batch, num_prompt_tokens: int, now: float) -> list[SequenceGroup]:
        """A step has been planned; num_prompt_tokens: of the prompts admitted so far.

        Returns:
            The groups whose first step it is.
        """
        if num_prompt_tokens == self._num_prompt_tokens:
            return []  # nothing was admitted for the first time
        self._num_prompt_tokens = num_prompt_tokens
        started = []
        for chunk in batch.chunks:
            group = chunk.sequence.group
            request = self._requests.get(group.request_id)
            if request is not None and request.scheduled is None:
                request.scheduled = now
                started.append(group)
        return started

    def committed(self, committed: Iterable[Committed], now: float) -> None:
        """Sequences got tokens."""
        ids = [one.sequence.request_id for one in committed if one.token_ids]
        last_token = self._last_token
        since = Counter(map(last_token.get, ids))
        if since.pop(None, 0):
            for request_id in ids:
                if request_id not in last_token:
                    self._first_token(request_id, now)
        for then, count in since.items():
            assert then is not None  # popped
            self._token_s.observe(now - then, count)
        last_token.update(dict.fromkeys(ids, now))

    def searched(self, request_id: int, num_tokens: int, now: float) -> None:
        """A beam search has its outputs, with so many tokens in all."""
        self._requests[request_id].num_beam_tokens = num_tokens
        self._first_token(request_id, now)
        self._last_token[request_id] = now

    def stepped(self, batch: Batch, has_drafts: bool, seconds: float) -> None:
        """A step has been processed."""
        chunks = batch.chunks
        last = chunks[-1]  # prompts come after decodes
        is_prefill = not last.samples or last.length > 1 + last.num_drafts
        # A decode without drafts is one token.
        num_tokens = batch.num_tokens if is_prefill or has_drafts else len(chunks)
        self._step_tokens.observe(num_tokens)
        (self._prefill_s if is_prefill else self._decode_s).observe(seconds)

    def failed(self, request_id: int, kind: str) -> None:
        """An accepted request has ended with an error."""
        if self._requests.pop(request_id, None) is not None:
            self._last_token.pop(request_id, None)
            self._num_failed[_known(kind)] += 1
            self._num_finished["error"] += 1

    def finished(self, group: SequenceGroup, now: float) -> None:
        """A request has ended; does nothing for one that has failed."""
        request = self._requests.pop(group.request_id, None)
        last = self._last_token.pop(group.request_id, now)
        if request is None or group.finish_reason is None:
            return
        self._num_finished[_REASONS[group.finish_reason]] += 1
        if group.finish_reason is FinishReason.CANCELLED:
            return  # its times say when a client lost interest
        num_tokens = request.num_beam_tokens or group.num_output_tokens
        scheduled = request.arrived if request.scheduled is None else request.scheduled
        first = last if request.first_token is None else request.first_token
        for stem, value in (
            ("e2e_request_latency_seconds", last - request.arrived),
            ("request_queue_time_seconds", scheduled - request.arrived),
            ("request_inference_time_seconds", last - scheduled),
            ("request_prefill_time_seconds", first - scheduled),
            ("request_decode_time_seconds", last - first),
            ("request_prompt_tokens", group.num_prompt_tokens),
            ("request_generation_tokens", num_tokens),
        ):
            self._histograms[stem][0].observe(value)
        if num_tokens > 1 and not request.num_beam_tokens:
            mean = (last - first) / (num_tokens - 1)
            self._histograms["request_time_per_output_token_seconds"][0].observe(mean)

    def snapshot(self, stats: Stats, counts: TokenCounts) -> Metrics:
        """A snapshot.

        Args:
            stats: the engine's, now.
            counts: from which these are.
        """
        num_accepted_at, from_outputs = counts.num_accepted_at, counts.from_outputs
        values: dict[str, list[float]] = {
            "num_preemptions": [stats.num_preemptions],
            "engine_up": [1],
            "engine_restarts": [0],
            "engine_steps": [stats.num_steps],
            "prompt_tokens": [stats.num_prompt_tokens],
            "prompt_tokens_cached": [stats.num_cached_tokens],
            "generation_tokens": [stats.num_output_tokens],
            "prefix_cache_queries": [stats.num_prompt_tokens * self._enable_prefix_caching],
            "prefix_cache_hits": [stats.num_cached_tokens],
            "kv_host_blocks_stored": [stats.num_host_blocks_stored],
            "kv_host_blocks_loaded": [stats.num_host_blocks_loaded],
            "kv_host_blocks_evicted": [stats.num_host_blocks_evicted],
            "kv_disk_blocks_written": [stats.num_disk_blocks_written],
            "kv_disk_blocks_read": [stats.num_disk_blocks_read],
            "request_success": [self._num_finished[reason] for reason in FINISHED_REASONS],
            "request_errors": [self._num_failed[kind] for kind in ERROR_KINDS],
            "requests_refused": [
                self._num_refused[by][kind] for by in (ENGINE, FRONT) for kind in ERROR_KINDS
            ],
            "queue_refusals": list(stats.num_refused_by_limit),
            "queue_timeouts": [self._num_queue_timeouts],
            "deadline_misses": [self._num_deadline_misses[state] for state in DEADLINE_STATES],
            "spec_decode_num_drafts": [sum(num_accepted_at)],
            "spec_decode_num_draft_tokens": [stats.num_drafted_tokens],
            "spec_decode_num_accepted_tokens": [stats.num_accepted_tokens],
            "spec_decode_num_draft_tokens_from_outputs": [from_outputs[0]],
            "spec_decode_num_accepted_tokens_from_outputs": [from_outputs[1]],
            "spec_decode_num_accepted_tokens_per_pos": [
                sum(num_accepted_at[position + 1 :]) for position in range(len(num_accepted_at) - 1)
            ],
        }
        return flat(
            self._engine,
            values | self._gauges(stats),
            {
                stem: [(one.counts.copy(), one.sum) for one in histograms]
                for stem, histograms in self._histograms.items()
            },
        )

    def _gauges(self, stats: Stats) -> dict[str, list[float]]:
        used = stats.num_blocks - stats.num_free_blocks
        usage = used / stats.num_blocks
        waiting = stats.num_waiting
        return {
            "num_requests_running": [stats.num_running],
            "num_requests_waiting": [waiting],
            "num_requests_queued": list(stats.num_waiting_by_class),
            "num_prompt_tokens_queued": list(stats.num_waiting_tokens_by_class),
            "num_requests_suspended": [stats.num_suspended],
            "num_requests_active": [stats.num_running + waiting + stats.num_suspended],
            "max_num_seqs": [self._max_num_seqs],
            "kv_cache_usage_perc": [usage],
            "kv_cache_blocks": [stats.num_free_blocks, used],
            "kv_host_max_blocks": [stats.max_host_blocks],
            "kv_host_blocks": [stats.num_host_blocks],
            "kv_disk_max_blocks": [stats.max_disk_blocks],
            "kv_disk_blocks": [stats.num_disk_blocks],
            "kv_cache_max_blocks": [stats.num_blocks],
            "kv_cache_block_size": [self._block_size],
            "saturation": [max(usage, waiting / self._max_num_seqs)],
        }

    def _first_token(self, request_id: int, now: float) -> None:
        request = self._requests[request_id]
        request.first_token = now
        self._first_token_s.observe(now - request.arrived)


def _known(kind: str) -> str:
    """The kind of an error as it is counted."""
    return kind if kind in ERROR_KINDS else EngineError.kind
