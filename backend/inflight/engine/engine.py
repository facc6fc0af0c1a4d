"""The engine: requests in, token events out. One thread calls it; it knows no process, no socket
and no Triton.

    speculation.plan(running)                 how many tokens to draft: as many as pay
    batch   = scheduler.schedule()            admit, budget, allocate: counts only
    pending = runner.launch(batch)            all device work: draft, forward, sample -> ids
    output  = pending.result()                of an earlier batch, if the runner works ahead
    moved   = scheduler.commit(batch, output) append, register full blocks
    events  = outputs.collect(moved)          text, stop strings, what may be released

A runner that works ahead computes one batch while the results of the one before it are taken in.
The next batch then carries tokens that the host does not know yet, of sequences that may turn out
to have ended: what it computes for these is dropped.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.core.batch import Batch, StepOutput
from inflight.core.output_constraint import GUIDE_FIELD, StructuredOutput
from inflight.core.request import AUTO_DRAFTS, FinishReason, Request, TokenEvent, check_length
from inflight.core.sequence import Sequence, Status
from inflight.engine.beam_search import BeamGroup
from inflight.engine.delivery import DeliveryWatch
from inflight.engine.output import OutputStage, bad_word_ids
from inflight.engine.stats import Stats
from inflight.errors import CapacityError, EngineError, InflightError, RequestError
from inflight.execution.runner import PendingStep, Runner
from inflight.sampling.params import DRY_SEQUENCE_BREAKERS
from inflight.scheduling.draft_budget import DraftBudget
from inflight.scheduling.scheduler import Scheduler
from inflight.text.detokenize import Detokenizer
from inflight.text.dry_breakers import DryBreakers
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.engine.grammar_queue import GrammarQueue
    from inflight.structured.matcher import Matcher

logger = logging.getLogger(__name__)

_COMPILING_POLL_S = 0.001

MAX_CONSECUTIVE_FAILURES = 8
"""Steps, with none between them that worked: no bad request does that, but a lost GPU does."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose result has not been taken yet."""

    batch: Batch
    pending: PendingStep
    time: float  # just before its launch


class Engine:
    """Continuous batching of requests over one runner.

    Args:
        config: settings.
        runner: where batches are computed.
        max_model_len: prompt and output together, in tokens.
        eos_token_ids: the model's own end-of-sequence tokens.
        tokenizer: needed for stop_words and bad_words only; ids are the engine's language.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.runner = runner
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_chunk=config.max_prefill_chunk,
            max_waiting=config.max_waiting,
            enable_prefix_caching=config.enable_prefix_caching,
            max_draft_tokens=config.max_draft_tokens,
            max_rows=runner.max_rows,
        )
        detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.outputs = OutputStage(detokenizer)
        self.breakers: DryBreakers | None = None
        if tokenizer is not None and detokenizer is not None:
            self.breakers = DryBreakers(tokenizer, detokenizer)
        self.delivery = DeliveryWatch()
        self.speculation = _speculation(config, runner)
        self.grammars: GrammarQueue | None = None
        self.num_steps = 0
        self.draining = False  # whether new requests are refused, since the server is stopping
        self._num_output_tokens = 0
        self._num_drafted_tokens = 0
        self._num_accepted_tokens = 0
        self._consecutive_failures = 0
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._beam_groups: dict[Sequence, BeamGroup] = {}  # by their heads
        self._waiting_siblings: dict[
            int, list[Sequence]
        ] = {}  # by the sibling whose prompt they wait for
        self._in_flight: deque[_Launched] = deque()  # oldest first
        self._last_result = 0.0  # when it was taken

    @property
    def has_work(self) -> bool:
        """Whether `step` would launch a batch or take a result."""
        scheduler = self.scheduler
        return bool(
            self._in_flight or scheduler.running or scheduler.waiting or self._waiting_siblings
        )

    @property
    def is_broken(self) -> bool:
        """Whether steps fail whatever is in them, as all do after an error of a GPU."""
        return self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES

    @property
    def is_compiling(self) -> bool:
        """Whether some request waits for its grammar, which `sweep` finds."""
        return self.grammars is not None and self.grammars.num_waiting > 0

    @property
    def has_suspended(self) -> bool:
        """Whether some request waits for a sign of its consumer."""
        return bool(self.scheduler.suspended)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served.
            CapacityError: too many are queued, or the server is stopping.
        """
        if self.draining:
            raise CapacityError("the server is stopping; send the request to another server")
        output_ids = request.output_ids or (request.request_id,)
        for request_id in output_ids:
            if request_id in self._sequences:
                raise RequestError(f"the request id {request_id} is in use")
        sequence = self._sequence(request)
        group = self._beam_group(sequence)
        if request.structured is None or self._has_grammar(sequence, request.structured):
            self._queue(sequence)
        # Only now: a refusal leaves nothing behind.
        if group is not None:
            self._beam_groups[sequence] = group
        elif self.speculation is not None:
            self.speculation.add(sequence)
        self._sequences.update(dict.fromkeys(output_ids, sequence))

    def _beam_group(self, sequence: Sequence) -> BeamGroup | None:
        """The beams of a sequence that is to be a beam search.

        Raises:
            RequestError: what it asks for does not go together, or is too much.
        """
        request = sequence.request
        output_ids, width = request.output_ids, request.params.beam_width
        if output_ids and (output_ids[0] != request.request_id or len(set(output_ids)) > width):
            raise RequestError(
                f"{len(output_ids)} outputs of {width} beams; allowed: up to beam_width, of which "
                "the first has the request's own id",
                "output_ids",
            )
        if width == 1:
            return None
        if request.structured is not None:
            raise RequestError(
                f"cannot be combined with beam_width {width}: a grammar follows one output",
                GUIDE_FIELD,
            )
        if request.acknowledged:
            raise RequestError(
                "delivery cannot be acknowledged before the end, when the best outputs are known",
                "beam_width",
            )
        return BeamGroup(sequence, self.outputs, self.runner.vocab_size)

    def _queue(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn; or first for the prompt that a sibling computes.

        Raises:
            RequestError, CapacityError: see `Scheduler.add`.
        """
        first = sequence.request.sibling
        sibling = None if first is None else self._sequences.get(first)
        if sibling is not None and not sibling.num_output_tokens:
            self._waiting_siblings.setdefault(sibling.request_id, []).append(sequence)
        else:
            self.scheduler.add(sequence)

    def _release_siblings(self, request_id: int) -> list[TokenEvent]:
        """Queue those who waited for this request's prompt; the events of who is refused."""
        refused = []
        for sequence in self._waiting_siblings.pop(request_id, ()):
            if sequence.status is Status.FINISHED:
                continue
            try:
                self.scheduler.add(sequence)
            except InflightError as reason:
                refused.append(self._fail(sequence, reason))
        return refused

    def _has_grammar(self, sequence: Sequence, constraint: StructuredOutput) -> bool:
        """Whether a request's grammar is there already; `sweep` looks for it otherwise."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer and takes token ids only", GUIDE_FIELD)
        if sequence.request.params.ignore_eos:
            raise RequestError(
                "cannot be combined with a grammar, which determines the end", "ignore_eos"
            )
        if self.grammars is None:
            from inflight.engine.grammar_queue import (
                GrammarQueue,  # and llguidance: not without need
            )

            self.grammars = GrammarQueue(self.tokenizer, self.runner.vocab_size, self.eos_token_ids)
        return self.grammars.submit(sequence, constraint)

    def cancel(self, request_id: int) -> list[TokenEvent]:
        """End a request and free its blocks; no events when it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        sequence.finish_reason = FinishReason.CANCELLED
        self._finish_request(sequence)
        return [
            TokenEvent(
                output_id,
                position=sequence.num_output_tokens,
                finish_reason=FinishReason.CANCELLED,
                cumulative_logprob=sequence.cumulative_logprob,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            for output_id in sequence.request.output_ids or (sequence.request_id,)
        ]

    def cancel_front(self, number: int) -> None:
        """End all requests of a front that has gone: nobody reads their events."""
        for request_id in [key for key in self._sequences if key >> 32 == number]:
            self.cancel(request_id)

    def delivered(self, progress: Iterable[tuple[int, int]]) -> None:
        """A detokenizer handed on the text up to (request_id, position) each."""
        now = self._clock()
        for request_id, position in progress:
            if self.delivery.delivered(request_id, position, now):
                self.scheduler.resume(self._sequences[request_id])

    def step(self) -> list[TokenEvent]:
        """Launch the next batch, if there is one, then take the oldest result if it is due.

        It is when the runner works no further ahead, or when there was nothing to launch.

        Returns:
            What the result, or a failed launch, did for each request that it touched.
        """
        events: list[TokenEvent] = []
        for request_id in [key for key in self._waiting_siblings if key not in self._sequences]:
            events += self._release_siblings(request_id)
        if self.speculation is not None:
            self.speculation.plan(self.scheduler.running)
        batch = self.scheduler.schedule()
        if batch.chunks:
            events += self._launch(batch)
        if len(self._in_flight) > (self.runner.steps_ahead if batch.chunks else 0):
            events += self._process_result(self._in_flight.popleft())
        return events

    def sweep(self) -> list[TokenEvent]:
        """What time brings: set aside requests whose consumer fell silent, end those that stay
        silent, begin those whose grammar has been compiled."""
        now = self._clock()
        compiled = [] if self.grammars is None else self._queue_compiled(self.grammars)
        for request_id in self.delivery.overdue(now):
            self.scheduler.suspend(self._sequences[request_id])
        return compiled + [
            event
            for request_id in self.delivery.abandoned(now)
            for event in self.cancel(request_id)
        ]

    def _queue_compiled(self, grammars: GrammarQueue) -> list[TokenEvent]:
        """Queue the requests whose grammar is there; the events of those that are refused."""
        refused = []
        for sequence, error in grammars.poll():
            try:
                if error is not None:
                    raise error
                self._queue(sequence)
            except InflightError as reason:
                refused.append(self._fail(sequence, reason))
        return refused

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_suspended=len(self.scheduler.suspended),
            num_free_blocks=self.scheduler.num_free_blocks,
            num_blocks=self.runner.num_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            num_prompt_tokens=self.scheduler.num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_drafted_tokens=self._num_drafted_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def _sequence(self, request: Request) -> Sequence:
        params = request.params
        length = len(request.prompt_ids)
        if length == 0:
            raise RequestError("the prompt has no tokens; allowed: at least 1", "input_ids")
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= self.runner.vocab_size:
            raise RequestError(
                f"token id {low if low < 0 else high} is not in the vocabulary; "
                f"allowed: 0 to {self.runner.vocab_size - 1}",
                "input_ids",
            )
        check_length(length, params.max_tokens, self.max_model_len, "input_ids")
        room = self.max_model_len - length
        params.check_vocabulary(self.runner.vocab_size)
        if self.tokenizer is None:
            for name in ("stop_words", "bad_words", "dry_sequence_breakers"):
                if getattr(params, name):
                    raise RequestError("this model has no tokenizer and takes token ids only", name)
        wanted = params.max_tokens
        if wanted is None:
            wanted = max(self.config.default_max_tokens, params.min_tokens)
            # Nobody asked for more than a small pool holds; who asks in so many words is refused.
            num_blocks, size = self.runner.num_blocks, self.runner.block_size
            shared = length // size  # by all beams, at least
            pool = (shared + (num_blocks - shared) // params.beam_width) * size
            wanted = max(1, min(wanted, pool - length))
        ends = self.eos_token_ids if params.end_id is None else self.eos_token_ids | {params.end_id}
        banned = bad_word_ids(self.tokenizer, params.bad_words) if self.tokenizer else ()
        breakers: frozenset[int] = frozenset()
        if self.breakers is not None and params.has_dry:
            wanted_breakers = params.dry_sequence_breakers
            if wanted_breakers is None:
                wanted_breakers = DRY_SEQUENCE_BREAKERS
            breakers = self.breakers.ids(wanted_breakers)
        return Sequence(
            request,
            max_tokens=min(wanted, room),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=ends,
            bad_word_ids=banned,
            breaker_ids=breakers,
        )

    def _launch(self, batch: Batch) -> list[TokenEvent]:
        """Put a batch in flight; the events of its failure if that fails."""
        now = self._clock()
        try:
            pending = self.runner.launch(batch)
        except Exception:  # whatever it is, it ends these requests and is logged with its trace
            return self._fail_batch(batch)
        self._in_flight.append(_Launched(batch, pending, now))
        return []

    def _process_result(self, launched: _Launched) -> list[TokenEvent]:
        """Wait for a step and take in what it computed."""
        batch = launched.batch
        try:
            output = launched.pending.result()
        except Exception:  # as in _launch
            return self._fail_batch(batch)
        self._consecutive_failures = 0
        failed = self._fail_errored(batch, output)
        advanced = self.scheduler.commit(batch, output)
        if self.speculation is not None:
            self.speculation.observe(batch, output)
        for sequence in advanced:
            if sequence.grammar is not None:
                failed += self._advance_grammar(sequence, sequence.grammar.matcher)
            if sequence.request_id in self._waiting_siblings:
                failed += self._release_siblings(sequence.request_id)
        advanced = [one for one in advanced if one.status is not Status.FINISHED]
        if self._beam_groups:
            heads = dict.fromkeys(one.head for one in advanced if one.head is not None)
            advanced = [one for one in advanced if one.head is None]
            for head in heads:
                failed += self._advance_beams(self._beam_groups[head])
        events = self.outputs.collect(advanced)
        scored = [batch.chunks[index] for index in output.prompt_candidates]
        events += self.outputs.prompt_events(
            chunk.sequence for chunk in scored if not (chunk.samples or chunk.is_stale)
        )
        for sequence in advanced:
            if sequence.finish_reason is not None:
                self._finish_request(sequence)
        self.num_steps += 1
        self._num_output_tokens += sum(len(one.last_logprobs) for one in advanced)
        self._num_drafted_tokens += sum(output.num_drafted.values())
        self._num_accepted_tokens += sum(
            len(output.token_ids[index]) - 1 for index in output.num_drafted
        )
        now = self._clock()
        # Of two steps in flight, the second one starts when the first one ends.
        self.delivery.record_step(now - max(launched.time, self._last_result))
        self._last_result = now
        self._track_delivery(events, now)
        return events + failed

    def _advance_beams(self, group: BeamGroup) -> list[TokenEvent]:
        """Let a beam search choose its next step; its events if it ends."""
        for beam in group.advance(self.scheduler):
            self.runner.forget(beam)
        if not group.is_finished:
            return []
        head = group.head
        results = group.results()
        if len(results) < max(1, len(head.request.output_ids)):
            error = EngineError(
                "too few tokens are allowed to follow for this many beam search outputs"
            )
            return [self._fail(head, error)]
        self._num_output_tokens += sum(one.num_output_tokens for one in results)
        events = self.outputs.collect(results)
        self._finish_request(head)
        return events

    def _advance_grammar(self, sequence: Sequence, grammar: Matcher) -> list[TokenEvent]:
        """Take what was chosen, up to the output's end; the event of the failure if it fails."""
        taken: list[int] = []
        for token_id in sequence.token_ids[-len(sequence.last_logprobs) :]:
            taken.append(token_id)
            if token_id in grammar.end_ids:
                break
        try:
            grammar.advance(taken)
            sequence.is_complete = grammar.is_finished
        except EngineError as error:
            return [self._fail(sequence, error)]
        return []

    def _track_delivery(self, events: list[TokenEvent], now: float) -> None:
        for event in events:
            sequence = self._sequences.get(event.request_id)
            if sequence is not None and sequence.request.acknowledged and event.token_ids:
                self.delivery.emitted(event.request_id, event.position, now)

    def _fail_errored(self, batch: Batch, output: StepOutput) -> list[TokenEvent]:
        return [
            self._fail(batch.chunks[index].sequence, EngineError(text))
            for index, text in output.errors.items()
            if not batch.chunks[index].is_stale
        ]

    def _fail_batch(self, batch: Batch) -> list[TokenEvent]:
        """End what a failed step held; call it where the exception is handled."""
        logger.exception("the step of %d sequences failed", len(batch.chunks))
        self._consecutive_failures += 1
        # The message is fixed: an exception's own text may hold addresses or other users' data.
        error = EngineError("the step that computed this request failed; it is safe to retry")
        return [self._fail(chunk.sequence, error) for chunk in batch.chunks if not chunk.is_stale]

    def _fail(self, sequence: Sequence, error: InflightError) -> TokenEvent:
        """End a request; one event does for all outputs of a beam search."""
        sequence = sequence.head or sequence
        self._finish_request(sequence)
        return TokenEvent.failed(sequence.request_id, error)

    def _finish_request(self, sequence: Sequence) -> None:
        """The one place where a request leaves the engine."""
        self.scheduler.finish(sequence)
        self.outputs.forget(sequence)
        self.delivery.finished(sequence.request_id)
        for one in sequence.beams or (sequence,):
            self.runner.forget(one)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        if self.grammars is not None:
            self.grammars.forget(sequence)
        self._beam_groups.pop(sequence, None)
        for request_id in sequence.request.output_ids or (sequence.request_id,):
            self._sequences.pop(request_id, None)


def _speculation(config: EngineConfig, runner: Runner) -> DraftBudget | None:
    """None where nothing is drafted."""
    settings = config.speculative_config
    if settings is None or runner.step_costs is None:
        return None
    default = {"auto": AUTO_DRAFTS, "off": 0}.get(str(settings.default))
    return DraftBudget(
        runner.step_costs,
        settings.num_speculative_tokens,
        int(settings.default) if default is None else default,
        host_drafts=runner.supports_host_drafts,
    )


def generate(engine: Engine, requests: Iterable[Request]) -> dict[int, list[int]]:
    """Run requests to their end in this thread. Returns output ids by request id; of a beam search,
    by those of its outputs.

    Raises:
        InflightError: a request was refused or failed.
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
