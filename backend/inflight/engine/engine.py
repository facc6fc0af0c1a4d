"""The engine: requests in, token events out. Called by one thread; independent of processes,
sockets and Triton.

    speculation.plan(running)                 number of draft tokens per sequence
    batch   = scheduler.schedule()            admit, budget, allocate: counts only
    pending = runner.launch(batch)            all device work: draft, forward, sample -> ids
    output  = pending.result()                of an earlier batch, if the runner works ahead
    done    = scheduler.commit(batch, output) append, register full blocks
    events  = outputs.collect(done)           text, stop strings, releasable tokens

A runner that works ahead computes one batch while the results of the previous one are processed.
The next batch then has tokens that the host does not know yet, of sequences that may turn out to
have ended: their results are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from inflight.config import EngineConfig
from inflight.core.batch import Batch, Committed, StepOutput
from inflight.core.quarantine import Quarantine
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.core.sequence import Sequence, SequenceGroup, Status
from inflight.engine.admission import Admission, PoolLimits
from inflight.engine.beam_search import BeamGroup, BeamSearches
from inflight.engine.delivery import DeliveryWatch
from inflight.engine.grammars import Grammars
from inflight.engine.metrics.recorder import Recorder
from inflight.engine.metrics.request_timings import RequestTimings
from inflight.engine.metrics.snapshot import Metrics
from inflight.engine.output import OutputStage
from inflight.engine.pipeline import Launched, StepPipeline
from inflight.engine.planning import make_draft_budget, make_prefill_budget, make_scheduler
from inflight.engine.sibling_queue import SiblingQueue
from inflight.engine.stats import Stats
from inflight.engine.token_counts import TokenCounts
from inflight.errors import (
    CapacityError,
    DeadlineError,
    EngineError,
    InflightError,
    RequestError,
)
from inflight.execution.runner import Runner
from inflight.scheduling.deadlines import Deadlines
from inflight.scheduling.drain_rate import DrainRate
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer

_COMPILING_POLL_S = 0.001
# A front's clock is this machine's; anything else is not a time of arrival.
_MAX_TRANSIT_S = 3600.0


class Engine:
    """Continuous batching of requests over one runner.

    Args:
        config: settings.
        runner: computes batches.
        max_model_len: maximum tokens of prompt and output.
        eos_token_ids: the model's own end-of-sequence tokens.
        tokenizer: needed only for options given as text; the engine works on token ids.
        clock: seconds, monotonic.
        on_launch: see `StepPipeline`.
        quarantine: of requests that crash the engine; by default one of its own.
        watts: the GPU's power now, for the energy of requests; None if it is not known.
    """

    def __init__(  # its parts, and four seams with defaults
        self,
        config: EngineConfig,
        runner: Runner,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_launch: Callable[[float], None] | None = None,
        quarantine: Quarantine | None = None,
        watts: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.max_model_len = max_model_len
        detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._prefill_budget = make_prefill_budget(config)
        self.scheduler = make_scheduler(config, runner, self._prefill_budget, clock)
        self.admission = Admission(
            PoolLimits(runner.num_blocks, runner.kv_tables, self.scheduler.max_num_seqs),
            runner.vocab_size,
            max_model_len,
            config.default_max_tokens,
            eos_token_ids,
            tokenizer,
            detokenizer,
        )
        self.outputs = OutputStage(detokenizer)
        self.searches = BeamSearches()
        self.siblings = SiblingQueue()
        self.delivery = DeliveryWatch()
        self.speculation = make_draft_budget(config, runner)
        self.grammars = Grammars(tokenizer, runner.vocab_size, self.admission.eos_token_ids)
        self.drain_reason = ""  # unless it is empty, new requests are rejected for it
        self.recorder = Recorder(
            self.scheduler.max_num_seqs, runner.block_size, config.enable_prefix_caching
        )
        self._deadlines = Deadlines()
        self._queue_timeouts = Deadlines()  # of requests before their first step
        self._drain_rate = DrainRate()
        self._quarantine = quarantine or Quarantine()
        self._timings = RequestTimings(watts)
        self._counts = TokenCounts()
        self._clock = clock
        self._groups: dict[int, SequenceGroup] = {}  # by the ids of their outputs
        self._pipeline = StepPipeline(runner, clock, on_launch)

    @property
    def has_work(self) -> bool:
        """Whether `step` would launch a batch or process a result."""
        scheduler = self.scheduler
        return bool(self._pipeline or scheduler.running or scheduler.waiting or self.siblings)

    @property
    def is_broken(self) -> bool:
        """Whether steps fail whatever they contain, as after a GPU error."""
        return self._pipeline.is_broken

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar; `sweep` picks it up."""
        return self.grammars.num_waiting > 0

    @property
    def is_storing(self) -> bool:
        """Whether KV blocks are on their way to host memory or disk; `sweep` sees to it."""
        host = self.scheduler.host_cache
        return host is not None and host.has_work

    @property
    def has_suspended(self) -> bool:
        """Whether a request is suspended until its consumer acknowledges."""
        return bool(self.scheduler.suspended)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end-of-sequence tokens."""
        return self.admission.eos_token_ids

    @property
    def num_steps(self) -> int:
        """Batches computed."""
        return self._counts.num_steps

    def submit(self, request: Request, arrived: float | None = None) -> None:
        """Queue a request; arrived: at the front, in the clock's seconds; None for now.

        Raises:
            RequestError: it can never be served.
            QuarantinedError: the engine crashed repeatedly while it ran it.
            CapacityError: too many are queued, or the server is stopping.
            DeadlineError: its deadline has passed on the way.
        """
        now = self._clock()
        if arrived is None or not now - _MAX_TRANSIT_S < arrived < now:
            arrived = now
        try:
            self._accept(request, now - arrived)
        except InflightError as error:
            self.recorder.refused(error.kind)
            raise
        self._limit_time(request, arrived)
        self.recorder.submitted(request.request_id, arrived)
        if request.return_timing:
            self._timings.add(self._groups[request.request_id], arrived)

    def _accept(self, request: Request, age_s: float) -> None:
        """Queue a request that arrived so many seconds ago; raises as `submit` does."""
        if self.drain_reason:
            raise CapacityError(self.drain_reason)
        if request.deadline_ms is not None and age_s * 1e3 >= request.deadline_ms:
            self.recorder.missed_deadline(request.request_id)
            raise _missed(request.deadline_ms, "it had not been queued yet")
        output_ids = request.output_ids or (request.request_id,)
        for request_id in output_ids:
            if request_id in self._groups:
                raise RequestError(f"the request id {request_id} is in use")
        sequence = self.admission.sequence(request)
        self._quarantine.check(request)
        group = self._group_of(sequence)
        if request.structured is None or self.grammars.submit(sequence, request.structured):
            self._queue(group)
        # Last, so that a refused request leaves nothing behind.
        self._groups.update(dict.fromkeys(output_ids, group))
        if isinstance(group, BeamGroup):
            self.searches.add(group)
        elif self.speculation is not None:
            self.speculation.add(sequence)
        if request.acknowledged:
            self.delivery.watch(request.request_id)

    def _limit_time(self, request: Request, arrived: float) -> None:
        """Watch the deadline of a request that was accepted, and its time in the queue."""
        if request.deadline_ms is not None:
            self._deadlines.add(request.request_id, arrived + request.deadline_ms / 1e3)
        if self.config.queue_timeout_s is not None:
            at = arrived + self.config.queue_timeout_s
            self._queue_timeouts.add(request.request_id, at)

    def cancel(self, request_id: int) -> list[TokenEvent]:
        """Cancel a request and free its blocks; no events if it is already finished."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        group.finish_reason = FinishReason.CANCELLED
        self._finish(group)
        events = [
            TokenEvent(
                output_id,
                position=group.num_output_tokens,
                finish_reason=FinishReason.CANCELLED,
                cumulative_logprob=group.cumulative_logprob,
                num_cached_tokens=group.num_cached_tokens,
            )
            for output_id in group.request.output_ids or (group.request_id,)
        ]
        return self._timings.attach(events)

    def delivered(self, progress: Iterable[tuple[int, int]]) -> None:
        """A detokenizer delivered text up to (request_id, position) each."""
        now = self._clock()
        for request_id, position in progress:
            if self.delivery.delivered(request_id, position, now):
                self.scheduler.resume(self._groups[request_id])

    def step(self) -> list[TokenEvent]:
        """Launch the next batch, if any, then process the oldest result if it is due.

        It is due when the runner works no further ahead, or when there was nothing to launch.

        Returns:
            The events of the processed result, or of a failed launch.
        """
        events = self._add_all(self.siblings.pop_orphans(self._groups))
        if self.speculation is not None:
            self.speculation.plan(self.scheduler.running)
        if self.runner.host_memory is not None:
            self.scheduler.stored(self.runner.take_stored())
        batch = self.scheduler.schedule()
        now = self._clock()
        num_prompt_tokens = self.scheduler.num_prompt_tokens
        started = self.recorder.scheduled(batch, num_prompt_tokens, now)
        if started:
            self._drain_rate.admitted(len(started), now)
        for group in started:
            self._quarantine.started(group.request)
            self._queue_timeouts.remove(group.request_id)
        if self._timings:
            self._timings.scheduled(batch, self.scheduler.lacks_blocks, now)
        if batch.chunks and not self._pipeline.launch(batch):
            events += self._fail_batch(batch)
        if self._pipeline.is_due(has_launched=bool(batch.chunks)):
            events += self._take_result()
        return events

    def sweep(self) -> list[TokenEvent]:
        """Periodic work, before each step: end requests that ran out of time, suspend those whose
        consumer fell silent, cancel those that remain silent, queue those whose grammar has been
        compiled."""
        now = self._clock()
        if self.runner.host_memory is not None and not self.has_work:
            self._store_blocks()
        events = self._end_overdue(now)
        for sequence, error in self.grammars.poll():
            try:
                if error is not None:
                    raise error
                self._queue(sequence)
            except InflightError as reason:
                events.append(self._fail(sequence, reason))
        for request_id in self.delivery.overdue(now):
            self.scheduler.suspend(self._groups[request_id])
            self._timings.suspended(request_id, now)
        for request_id in self.delivery.abandoned(now):
            events += self.cancel(request_id)
        return events

    def _end_overdue(self, now: float) -> list[TokenEvent]:
        """End requests whose deadline has passed, and those that were queued for too long."""
        events = []
        for request_id in self._deadlines.pop_missed(now):
            group = self._groups[request_id]
            deadline_ms = group.request.deadline_ms
            assert deadline_ms is not None
            self.recorder.missed_deadline(request_id)
            what = f"it had {group.num_output_tokens} output tokens"
            events.append(self._fail(group, _missed(deadline_ms, what)))
        for request_id in self._queue_timeouts.pop_missed(now):
            self.recorder.timed_out()
            error = CapacityError(
                f"the request was queued for {self.config.queue_timeout_s:g} s, the "
                f"queue_timeout_s of this model; retry in {self._retry_after_s(now)} s"
            )
            events.append(self._fail(self._groups[request_id], error))
        return events

    def _store_blocks(self) -> None:
        """Copy blocks to the lower tiers while nothing runs."""
        self.scheduler.stored(self.runner.take_stored())
        batch = self.scheduler.plan_stores()
        if batch.stores and not self._pipeline.launch_copies(batch):
            self.scheduler.abandon(batch)

    def stats(self) -> Stats:
        """A snapshot of the engine's statistics."""
        return self._counts.snapshot(
            self.scheduler, self.runner.num_blocks, self.outputs.num_tokens
        )

    def metrics(self) -> Metrics:
        """A snapshot of what the engine has counted and measured."""
        return self.recorder.snapshot(self.stats(), self._counts)

    def _group_of(self, sequence: Sequence) -> SequenceGroup:
        """The group of a request: its sequence, or its beams."""
        if sequence.width == 1:
            return sequence
        stop_conditions = self.outputs.stop_conditions_of(sequence)
        return BeamGroup(sequence, stop_conditions, self.runner.vocab_size)

    def _queue(self, group: SequenceGroup) -> None:
        """Queue a request, or hold it until a sibling has computed the prompt.

        Raises:
            CapacityError: see `Scheduler.add`.
        """
        first = group.request.sibling
        sibling = None if first is None else self._groups.get(first)
        if sibling is not None and not sibling.num_output_tokens:
            self.siblings.add(group, sibling)
        else:
            self._enqueue(group)

    def _add_all(self, siblings: Iterable[SequenceGroup]) -> list[TokenEvent]:
        """Queue requests that no longer wait for a sibling; returns the events of rejected ones."""
        refused = []
        for group in siblings:
            try:
                self._enqueue(group)
            except InflightError as reason:
                refused.append(self._fail(group, reason))
        return refused

    def _enqueue(self, group: SequenceGroup) -> None:
        """Raises CapacityError: see `Scheduler.add`."""
        if not self.scheduler.waiting:
            self._drain_rate.restart()
        self.scheduler.add(group, self._retry_after_s(self._clock()))

    def _retry_after_s(self, now: float) -> int:
        """Seconds until those that wait now will have been admitted."""
        return self._drain_rate.seconds_for(len(self.scheduler.waiting), now)

    def _take_result(self) -> list[TokenEvent]:
        """Wait for the oldest step and process its results."""
        launched, output = self._pipeline.take()
        batch = launched.batch
        if output is None:
            return self._fail_batch(batch)
        self._quarantine.step_succeeded()
        failed = self._fail_errored(batch, output)
        committed = self.scheduler.commit(batch, output)
        if self.speculation is not None:
            self.speculation.observe(batch, output)
        failed += [self._fail(*failure) for failure in self.grammars.advance(committed)]
        failed += self._add_all(self.siblings.pop_ready(committed))
        if failed:
            committed = [one for one in committed if one.sequence.status is not Status.FINISHED]
        committed, searched = self.searches.split(committed)
        for search, candidates in searched.items():
            failed += self._advance_search(search, candidates)
        events = self.outputs.collect(committed)
        self.recorder.committed(committed, self._clock())
        for one in committed:
            if one.sequence.finish_reason is not None:
                self._finish(one.sequence)
        self._counts.add(output)
        self._watch_delivery(launched, output, events)
        events += failed
        return self._timings.attach(events) if self._timings else events

    def _advance_search(self, search: BeamGroup, candidates: list[Committed]) -> list[TokenEvent]:
        """Continue a beam search; returns its events if it ends."""
        for beam in search.advance(candidates, self.scheduler):
            self.runner.forget(beam)
        if not search.is_finished:
            return []
        results = search.results()
        if len(results) < max(1, len(search.request.output_ids)):
            error = EngineError(
                "too few tokens are allowed to follow for this many beam search outputs"
            )
            return [self._fail(search, error)]
        events = self.outputs.collect(results)
        search.finish_reason = results[0].sequence.finish_reason
        num_tokens = sum(one.sequence.num_output_tokens for one in results)
        self.recorder.searched(search.request_id, num_tokens, self._clock())
        self._finish(search)
        return events

    def _watch_delivery(
        self, launched: Launched, output: StepOutput, events: list[TokenEvent]
    ) -> None:
        """Record a step's duration and its events for delivery tracking."""
        now, duration = self._pipeline.end_of(launched)
        self.recorder.stepped(launched.batch, bool(output.num_drafted), duration)
        if self._prefill_budget is not None:
            self._prefill_budget.observe(launched.batch, duration)
        if self._timings:
            self._timings.processed(launched.batch, now, duration)
        self.delivery.record_step(duration)
        self.delivery.record_events(events, now)

    def _fail_errored(self, batch: Batch, output: StepOutput) -> list[TokenEvent]:
        return [
            self._fail(batch.chunks[index].sequence, EngineError(text))
            for index, text in output.errors.items()
            if not batch.chunks[index].is_stale
        ]

    def _fail_batch(self, batch: Batch) -> list[TokenEvent]:
        """Fail the requests of a failed step."""
        # A fixed message: the exception's text may contain addresses or other users' data.
        error = EngineError("the step that computed this request failed; it is safe to retry")
        self._quarantine.step_failed({one.sequence.group.request_id for one in batch.chunks})
        # The first beam of a search fails all of them, and the others become stale.
        events = [self._fail(one.sequence, error) for one in batch.chunks if not one.is_stale]
        self.scheduler.abandon(batch)
        return events

    def _fail(self, group: SequenceGroup, error: InflightError) -> TokenEvent:
        """Fail a request; one event covers all outputs of a beam search."""
        if isinstance(group, Sequence):
            group = group.group
        self.recorder.failed(group.request_id, error.kind)
        self._timings.forget(group.request_id)
        self._finish(group)
        return TokenEvent.failed(group.request_id, error)

    def _finish(self, group: SequenceGroup) -> None:
        """The single place where a request leaves the engine."""
        self.scheduler.finish(group)
        self.recorder.finished(group, self._clock())
        if group.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._quarantine.completed(group.request_id)
        else:
            self._quarantine.ended(group.request_id)
        self._deadlines.remove(group.request_id)
        self._queue_timeouts.remove(group.request_id)
        self.outputs.forget(group)
        self.delivery.finished(group.request_id)
        for sequence in group.members:
            self.runner.forget(sequence)
        if self.speculation is not None:
            self.speculation.forget(group)
        self.grammars.forget(group)
        self.searches.forget(group)
        for request_id in group.request.output_ids or (group.request_id,):
            self._groups.pop(request_id, None)


def _missed(deadline_ms: int, what: str) -> DeadlineError:
    return DeadlineError(
        f"deadline_ms: the request was not complete {deadline_ms} ms after its arrival ({what}); "
        "allow it more time, or send it when the load is lower"
    )


def generate(engine: Engine, requests: Iterable[Request]) -> dict[int, list[int]]:
    """Run requests to completion in this thread. Returns output ids by request id; for a beam
    search, by its outputs' ids.

    Raises:
        InflightError: a request was rejected or failed.
    """
    outputs: dict[int, list[int]] = {}
    for request in requests:
        engine.submit(request)
        outputs |= {one: [] for one in request.output_ids or (request.request_id,)}
    while engine.has_work or engine.is_compiling:
        if not engine.has_work:
            time.sleep(_COMPILING_POLL_S)
        for event in engine.sweep() + engine.step():
            if event.error is not None:
                raise InflightError(event.error)
            outputs[event.request_id] += event.token_ids
    return outputs
