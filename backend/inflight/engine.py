"""The engine: requests in, token events out. One thread calls it; it knows no process, no socket
and no Triton.

    batch   = scheduler.schedule()            admit, budget, allocate: counts only
    pending = runner.launch(batch)            all device work: forward, sample -> ids
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

from inflight.batch import Batch, StepOutput
from inflight.config import EngineConfig
from inflight.delivery import DeliveryWatch
from inflight.errors import CapacityError, EngineError, InflightError, RequestError
from inflight.output import OutputStage, bad_word_ids
from inflight.request import FinishReason, Request, TokenEvent
from inflight.runner import PendingStep, Runner
from inflight.scheduler import Scheduler
from inflight.sequence import Sequence
from inflight.stats import Stats
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 8
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
            max_batch_tokens=config.max_batch_tokens,
            max_prefill_chunk=config.max_prefill_chunk,
            max_waiting=config.max_waiting,
            prefix_cache=config.prefix_cache,
        )
        self.outputs = OutputStage(Detokenizer(tokenizer) if tokenizer else None)
        self.delivery = DeliveryWatch()
        self.num_steps = 0
        self.draining = False  # whether new requests are refused, since the server is stopping
        self._num_output_tokens = 0
        self._failures_in_a_row = 0
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[_Launched] = deque()  # oldest first
        self._last_result = 0.0  # when it was taken

    @property
    def has_work(self) -> bool:
        """Whether `step` would launch a batch or take a result."""
        return bool(self._in_flight or self.scheduler.running or self.scheduler.waiting)

    @property
    def is_broken(self) -> bool:
        """Whether steps fail whatever is in them, as all do after an error of a GPU."""
        return self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW

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
            raise CapacityError("the server is stopping; send the request to another one")
        if request.request_id in self._sequences:
            raise RequestError(f"the request id {request.request_id} is in use")
        sequence = self._sequence(request)
        self.scheduler.add(sequence)
        self._sequences[request.request_id] = sequence  # only now: a refusal leaves nothing behind

    def cancel(self, request_id: int) -> list[TokenEvent]:
        """End a request and free its blocks; no events when it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        sequence.finish_reason = FinishReason.CANCELLED
        self._close(sequence)
        return [
            TokenEvent(
                request_id,
                position=sequence.num_output_tokens,
                finish_reason=FinishReason.CANCELLED,
                cumulative_logprob=sequence.cumulative_logprob,
                num_cached_tokens=sequence.num_cached_tokens,
            )
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
        batch = self.scheduler.schedule()
        events = self._launch(batch) if batch.chunks else []
        if len(self._in_flight) > (self.runner.steps_ahead if batch.chunks else 0):
            events += self._take(self._in_flight.popleft())
        return events

    def sweep(self) -> list[TokenEvent]:
        """Set aside requests whose consumer fell silent, end those that stay silent."""
        now = self._clock()
        for request_id in self.delivery.overdue(now):
            self.scheduler.suspend(self._sequences[request_id])
        return [
            event
            for request_id in self.delivery.abandoned(now)
            for event in self.cancel(request_id)
        ]

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
        room = self.max_model_len - length
        if room < 1:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt has {length}; allowed: {self.max_model_len - 1} and one to generate",
                "input_ids",
            )
        if params.end_id is not None and params.end_id >= self.runner.vocab_size:
            raise RequestError(
                f"{params.end_id} is not in the vocabulary; "
                f"allowed: 0 to {self.runner.vocab_size - 1}",
                "end_id",
            )
        if self.tokenizer is None and (params.stop_words or params.bad_words):
            raise RequestError(
                "this model has no tokenizer, so it knows ids only",
                "stop_words" if params.stop_words else "bad_words",
            )
        wanted = params.max_tokens
        if wanted is None:
            wanted = max(self.config.default_max_tokens, params.min_tokens)
            # Nobody asked for more than a small pool holds; who asks in so many words is refused.
            pool = self.runner.num_blocks * self.runner.block_size
            wanted = max(1, min(wanted, pool - length))
        ends = self.eos_token_ids if params.end_id is None else self.eos_token_ids | {params.end_id}
        banned = bad_word_ids(self.tokenizer, params.bad_words) if self.tokenizer else ()
        return Sequence(
            request,
            max_tokens=min(wanted, room),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=ends,
            bad_word_ids=banned,
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

    def _take(self, launched: _Launched) -> list[TokenEvent]:
        """Wait for a step and take in what it computed."""
        batch = launched.batch
        try:
            output = launched.pending.result()
        except Exception:  # as in _launch
            return self._fail_batch(batch)
        self._failures_in_a_row = 0
        failed = self._fail_some(batch, output)
        advanced = self.scheduler.commit(batch, output)
        events = self.outputs.collect(advanced)
        for sequence in advanced:
            if sequence.finish_reason is not None:
                self._close(sequence)
        self.num_steps += 1
        self._num_output_tokens += len(advanced)
        now = self._clock()
        # Of two steps in flight, the second one starts when the first one ends.
        self.delivery.stepped(now - max(launched.time, self._last_result))
        self._last_result = now
        self._watch(events, now)
        return events + failed

    def _watch(self, events: list[TokenEvent], now: float) -> None:
        for event in events:
            sequence = self._sequences.get(event.request_id)
            if sequence is not None and sequence.request.acknowledged and event.token_ids:
                self.delivery.emitted(event.request_id, event.position, now)

    def _fail_some(self, batch: Batch, output: StepOutput) -> list[TokenEvent]:
        return [
            self._fail(batch.chunks[index].sequence, EngineError(text))
            for index, text in output.errors.items()
            if not batch.chunks[index].is_stale
        ]

    def _fail_batch(self, batch: Batch) -> list[TokenEvent]:
        """End what a failed step held; call it where the exception is handled."""
        logger.exception("the step of %d sequences failed", len(batch.chunks))
        self._failures_in_a_row += 1
        # The message is fixed: an exception's own text may hold addresses or other users' data.
        error = EngineError("the step that held this request failed; it is safe to send it again")
        return [self._fail(chunk.sequence, error) for chunk in batch.chunks if not chunk.is_stale]

    def _fail(self, sequence: Sequence, error: EngineError) -> TokenEvent:
        self._close(sequence)
        return TokenEvent.failed(sequence.request_id, error)

    def _close(self, sequence: Sequence) -> None:
        """The one place where a request leaves the engine."""
        self.scheduler.finish(sequence)
        self.outputs.forget(sequence)
        self.delivery.finished(sequence.request_id)
        self._sequences.pop(sequence.request_id, None)


def generate(engine: Engine, requests: Iterable[Request]) -> dict[int, list[int]]:
    """Run requests to their end in this thread. Returns output ids by request id.

    Raises:
        InflightError: a request was refused or failed.
    """
    outputs: dict[int, list[int]] = {}
    for request in requests:
        engine.submit(request)
        outputs[request.request_id] = []
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise InflightError(event.error)
            outputs[event.request_id] += event.token_ids
    return outputs
