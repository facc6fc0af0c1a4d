"""The grammars of requests for structured output: compiled beside the engine, walked with it."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.errors import EngineError, InflightError
from inflight.sequence import Sequence
from inflight.structured import bridge
from inflight.structured.compiler import Compiler, Ticket
from inflight.structured.grammar import Grammar
from inflight.structured.guide import StructuredOutput
from inflight.structured.masks import MaskFiller
from inflight.structured.matcher import Matcher
from inflight.structured.walk import Walk
from inflight.text.tokenizer import Tokenizer


class Grammars:
    """Compiles what requests ask for; the engine's thread calls it and never waits for it.

    The vocabulary is made with the first such request: an engine without any has no cost.

    Args:
        tokenizer: the model's.
        vocab_size: of its logits.
        end_ids: tokens that end its outputs.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._vocabulary = bridge.vocabulary(tokenizer, vocab_size, end_ids)
        self._compiler = Compiler(self._vocabulary, bridge.encoder(tokenizer, self._vocabulary))
        self._filler = MaskFiller(self._vocabulary)
        self._waiting: dict[int, tuple[Ticket, Sequence]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not there yet."""
        return len(self._waiting)

    def submit(self, sequence: Sequence, wish: StructuredOutput) -> bool:
        """Ask for a sequence's grammar. True if it is there, as it is if it was used lately.

        Raises:
            InflightError: it was refused.
        """
        ticket = self._compiler.submit(wish)
        if ticket.error is not None:
            raise ticket.error
        if ticket.grammar is not None:
            self._start(sequence, ticket.grammar)
            return True
        self._waiting[sequence.request_id] = (ticket, sequence)
        return False

    def poll(self) -> list[tuple[Sequence, InflightError | None]]:
        """The sequences whose grammar has been compiled since, or refused, and then why."""
        done: list[tuple[Sequence, InflightError | None]] = []
        for ticket in self._compiler.poll():
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

    def forget(self, sequence: Sequence) -> None:
        """A request has ended; idempotent."""
        found = self._waiting.pop(sequence.request_id, None)
        if found is not None:
            self._compiler.cancel(found[0])

    def close(self) -> None:
        """End the compiler's thread and process."""
        self._compiler.close()

    def _start(self, sequence: Sequence, grammar: Grammar) -> None:
        matcher = Matcher(grammar, self._vocabulary, sequence.eos_token_ids)
        sequence.grammar = Walk(matcher, self._filler)
