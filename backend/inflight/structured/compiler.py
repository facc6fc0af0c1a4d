"""Guides in, grammars out, without blocking the calling thread.

A guide is untrusted input. It is test-compiled in the `sandbox`, a process with time and memory
limits, and only what passed is compiled here, by a dedicated thread that does not hold the GIL.

Nothing compiled crosses the border: the library cannot serialise its state, and unpickling data
from a process that may be compromised would compromise the engine. Only a verdict crosses: text to
compile, a refusal, and four numbers. So every guide is compiled twice. That is sound:

- The library is deterministic and both sides compile the same text (the sandbox returns what it
  compiled), over the same vocabulary, under the same limits. So time and memory are about the same
  here: below the time limit, on a thread that is not joined, and below the memory limit, one
  grammar at a time.
- Retained memory was measured there and is bounded (`MAX_GRAMMAR_BYTES`); the cache counts it.
- The stack there is smaller than any thread's here.
- What compiles fast may still be slow to use, since automata are built lazily. The sandbox walks
  through it, which finds the gross cases; the library's limits per step and on the lexer bound the
  rest and fail only the one request (`grammar`, `matcher`).
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable

import llguidance

from inflight.core.output_constraint import GUIDE_FIELD, StructuredOutput
from inflight.errors import CapacityError, EngineError, InflightError, RequestError
from inflight.structured.cache import BoundedCache
from inflight.structured.grammar import Grammar, Verdict
from inflight.structured.sandbox import MEMORY_LIMIT, TIME_LIMIT_S, Sandbox, SandboxLost
from inflight.structured.vocabulary import Encode, Vocabulary

logger = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
MAX_WAITING = 256
"""Guides in the queue; the slowest takes a second."""

# Memory of a grammar beyond what is measured: objects, and reused pages.
_OVERHEAD_BYTES = 64 << 10
# A refusal may be due to a briefly overloaded machine, so it expires.
_REFUSAL_S = 60.0

_Outcome = Grammar | InflightError


class Ticket:
    """One request's pending grammar.

    Attributes:
        constraint: what is compiled.
        grammar: the result; None until it is compiled.
        error: why it failed: RequestError if the guide is at fault, else EngineError.
    """

    __slots__ = ("constraint", "error", "grammar")

    def __init__(self, constraint: StructuredOutput) -> None:
        self.constraint = constraint
        self.grammar: Grammar | None = None
        self.error: InflightError | None = None

    @property
    def done(self) -> bool:
        return self.grammar is not None or self.error is not None

    def _resolve(self, outcome: _Outcome) -> None:
        if isinstance(outcome, Grammar):
            self.grammar = outcome
        else:
            self.error = outcome


class _Job:
    """A guide being compiled, and the tickets waiting for it."""

    def __init__(self, key: bytes, constraint: StructuredOutput) -> None:
        self.key = key
        self.constraint = constraint
        self.tickets: list[Ticket] = []
        self.abandoned = False  # by all tickets; read by the compiler's thread


class Compiler:
    """Compiles guides on its own thread; its methods are called by one thread, the engine's.

    Args:
        vocabulary: of the model.
        encode: see `Vocabulary.llguidance_tokenizer`; called from several threads.
        cache_bytes: bound of what is kept for later requests.
        time_limit_s: for a guide, in the sandbox.
        memory_limit: bytes, likewise.
        wake: called on the compiler's thread when `poll` has something.
        clock: seconds, monotonic.

    Attributes:
        num_compiled: guides that went through the sandbox.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Encode | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit: int = MEMORY_LIMIT,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_compiled = 0
        self._vocabulary = vocabulary
        self._encode = encode
        self._wake = wake
        self._clock = clock
        self._sandbox = Sandbox(vocabulary, time_limit_s, memory_limit)
        self._cache: BoundedCache[bytes, tuple[_Outcome, float]] = BoundedCache(cache_bytes)
        self._jobs: dict[bytes, _Job] = {}
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[_Job, _Outcome]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Guides that are not compiled yet."""
        return len(self._jobs)

    @property
    def cached_bytes(self) -> int:
        return self._cache.num_bytes

    @property
    def sandbox_pid(self) -> int | None:
        return self._sandbox.pid

    def warm(self) -> None:
        """Start the thread and its child now, instead of with the first guide.

        Raises:
            CapacityError: this process cannot start a thread.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CapacityError(f"grammars cannot be compiled: {error}; retry later") from None
            self._thread = thread

    def submit(self, constraint: StructuredOutput) -> Ticket:
        """Request a grammar; never blocks.

        Returns:
            A ticket, done already if the guide is cached; otherwise `poll` returns it once done.

        Raises:
            CapacityError: too many guides are waiting, or no thread can be started.
        """
        ticket = Ticket(constraint)
        key = hashlib.sha256(f"{constraint.kind}\0{constraint.guide}".encode()).digest()
        found = self._cache.get(key)
        if found is not None:
            outcome, until = found
            if self._clock() < until:
                ticket._resolve(outcome)
                return ticket
            self._cache.discard(key)
        job = self._jobs.get(key)
        if job is None:
            if len(self._jobs) >= MAX_WAITING:
                raise CapacityError(
                    f"{len(self._jobs)} grammars are queued for compilation; retry later"
                )
            self.warm()
            job = self._jobs[key] = _Job(key, constraint)
            self._inbox.put(job)
        job.tickets.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket: `poll` will not return it."""
        for job in self._jobs.values():
            if ticket in job.tickets:
                job.tickets.remove(ticket)
                if not job.tickets:
                    job.abandoned = True
                    del self._jobs[job.key]
                return

    def poll(self) -> list[Ticket]:
        """The tickets completed since the last call."""
        done: list[Ticket] = []
        while not self._outbox.empty():
            job, outcome = self._outbox.get()
            self._remember(job.key, outcome)
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            for ticket in job.tickets:
                ticket._resolve(outcome)
                done.append(ticket)
        return done

    def close(self) -> None:
        """Stop thread and child; unfinished tickets never complete."""
        self._closed = True
        self._inbox.put(None)
        self._sandbox.kill()  # the thread may wait for it
        if self._thread is not None:
            self._thread.join()
        self._sandbox.close()

    def _remember(self, key: bytes, outcome: _Outcome) -> None:
        if isinstance(outcome, Grammar):
            size = outcome.num_bytes + len(outcome.source) + _OVERHEAD_BYTES
            self._cache.put(key, (outcome, float("inf")), size)
        elif isinstance(outcome, RequestError):
            self._cache.put(key, (outcome, self._clock() + _REFUSAL_S), 1024 + len(str(outcome)))

    def _run(self) -> None:
        tokenizer: llguidance.LLTokenizer | None = None
        try:
            tokenizer = self._vocabulary.llguidance_tokenizer(self._encode)
            self._sandbox.start()
        except Exception:  # raised again with the first guide, and reported to its request
            logger.exception("grammars cannot be compiled")
        while (job := self._inbox.get()) is not None:
            if job.abandoned:
                continue
            outcome: _Outcome
            try:
                if tokenizer is None:
                    tokenizer = self._vocabulary.llguidance_tokenizer(self._encode)
                outcome = self._compile(tokenizer, job.constraint)
            except InflightError as error:
                outcome = error
            except BaseException as error:  # includes Rust panics; this thread must survive
                logger.error("a grammar broke the compiler: %s", type(error).__name__)
                outcome = EngineError("the grammar crashed the compiler; see the engine's log")
            self._outbox.put((job, outcome))
            self._wake()

    def _compile(self, tokenizer: llguidance.LLTokenizer, constraint: StructuredOutput) -> Grammar:
        verdict = self._examine(constraint)
        self.num_compiled += 1
        if verdict.source is None:
            raise RequestError(verdict.refusal, GUIDE_FIELD)
        return Grammar(
            tokenizer,
            verdict.source,
            compile_s=verdict.compile_s,
            num_bytes=verdict.num_bytes,
            is_json=constraint.kind in ("json", "json_schema"),
        )

    def _examine(self, constraint: StructuredOutput) -> Verdict:
        for _ in range(2):
            try:
                return self._sandbox.examine(constraint)
            except SandboxLost:
                if self._closed:
                    raise EngineError("the engine is stopping") from None
                # It survives any guide by design, so something else killed it: retry once.
                logger.warning("the grammar compiler process died; restarting it")
        raise EngineError("the grammar compiler process died twice; retry later")
