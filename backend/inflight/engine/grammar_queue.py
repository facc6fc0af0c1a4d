"""Grammars of structured outputs: compiled in the background, then attached to sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from inflight.core.output_constraint import StructuredOutput
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.errors import CapacityError, EngineError, InflightError
from inflight.structured import bridge
from inflight.structured.compiler import Compiler, Ticket
from inflight.structured.grammar import Grammar
from inflight.structured.grammar_state import GrammarState
from inflight.structured.masks import MaskFiller
from inflight.structured.matcher import Matcher
from inflight.structured.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _GrammarBackend:
    """The per-model state."""

    vocabulary: Vocabulary
    compiler: Compiler
    filler: MaskFiller


class GrammarQueue:
    """Compiles the grammars of requests; called by the engine's thread, which never waits for it.

    The vocabulary is built on another thread when the first such request arrives, so it costs an
    engine without structured output nothing.

    Args:
        tokenizer: the model's.
        vocab_size: of its logits.
        end_ids: tokens that end its outputs.

    Raises:
        CapacityError: this process cannot start a thread.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> None:
        maker = ThreadPoolExecutor(1, "vocabulary")
        try:
            self._backend_future = maker.submit(_make, tokenizer, vocab_size, frozenset(end_ids))
        except RuntimeError as error:
            raise CapacityError(f"grammars cannot be compiled: {error}; retry later") from None
        maker.shutdown(wait=False)
        # Arrived before the backend was built.
        self._unsubmitted: list[tuple[Sequence, StructuredOutput]] = []
        self._waiting: dict[int, tuple[Ticket, Sequence]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return len(self._unsubmitted) + len(self._waiting)

    def submit(self, sequence: Sequence, constraint: StructuredOutput) -> bool:
        """Request a sequence's grammar. True if it is attached at once, from the cache.

        Raises:
            InflightError: the grammar was rejected.
        """
        if not self._backend_future.done():
            self._unsubmitted.append((sequence, constraint))
            return False
        ticket = self._backend.compiler.submit(constraint)
        if ticket.error is not None:
            raise ticket.error
        if ticket.grammar is not None:
            self._start(sequence, ticket.grammar)
            return True
        self._waiting[sequence.request_id] = (ticket, sequence)
        return False

    def poll(self) -> list[tuple[Sequence, InflightError | None]]:
        """Sequences whose grammar was compiled or rejected since the last call, with the error."""
        if not self._backend_future.done():
            return []
        done: list[tuple[Sequence, InflightError | None]] = []
        early, self._unsubmitted = self._unsubmitted, []
        for sequence, constraint in early:
            try:
                if self.submit(sequence, constraint):
                    done.append((sequence, None))
            except InflightError as refusal:
                done.append((sequence, refusal))
        for ticket in self._backend.compiler.poll() if self._waiting else ():
            for request_id, (waiting, sequence) in list(self._waiting.items()):
                if waiting is not ticket:
                    continue
                del self._waiting[request_id]
                error = ticket.error
                if ticket.grammar is not None:
                    try:
                        self._start(sequence, ticket.grammar)
                    except EngineError as failure:
                        error = failure
                done.append((sequence, error))
        return done

    def forget(self, group: SequenceGroup) -> None:
        """Drop a finished request; idempotent."""
        self._unsubmitted = [early for early in self._unsubmitted if early[0] is not group]
        found = self._waiting.pop(group.request_id, None)
        if found is not None:
            self._backend.compiler.cancel(found[0])

    @property
    def _backend(self) -> _GrammarBackend:
        """The backend, once it is built; blocks until then.

        Raises:
            EngineError: building it failed.
        """
        try:
            return self._backend_future.result()
        except InflightError:
            raise
        except Exception as error:  # a library's: logged; the requests get only its type
            logger.exception("grammars cannot be compiled for this model")
            raise EngineError(
                f"grammars cannot be compiled for this model: {type(error).__name__}"
            ) from None

    def _start(self, sequence: Sequence, grammar: Grammar) -> None:
        tools = self._backend
        matcher = Matcher(grammar, tools.vocabulary, sequence.eos_token_ids)
        sequence.grammar = GrammarState(matcher, tools.filler)


def _make(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> _GrammarBackend:
    vocabulary = bridge.vocabulary(tokenizer, vocab_size, end_ids)
    compiler = Compiler(vocabulary, bridge.encoder(tokenizer, vocabulary))
    return _GrammarBackend(vocabulary, compiler, MaskFiller(vocabulary))
