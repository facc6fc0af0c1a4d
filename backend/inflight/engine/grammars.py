"""The grammars of an engine's requests. Nothing is loaded before the first request that has one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from inflight.core.batch import Committed
from inflight.core.output_constraint import StructuredOutput
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.errors import EngineError, InflightError
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.engine.grammar_queue import GrammarQueue


class Grammars:
    """Has them compiled, and lets each follow its output.

    Args:
        tokenizer: the model's; None where no request may have a grammar (see `engine.admission`).
        vocab_size: of the model's logits.
        end_ids: tokens that end the model's outputs.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._queue: GrammarQueue | None = None

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return 0 if self._queue is None else self._queue.num_waiting

    def submit(self, sequence: Sequence, constraint: StructuredOutput) -> bool:
        """Ask for a sequence's grammar. Returns whether it has it now; `poll` gives it otherwise.

        Raises:
            InflightError: it was refused.
        """
        if self._queue is None:
            assert self._tokenizer is not None
            from inflight.engine.grammar_queue import GrammarQueue  # llguidance takes its time

            self._queue = GrammarQueue(self._tokenizer, self._vocab_size, self._end_ids)
        return self._queue.submit(sequence, constraint)

    def poll(self) -> list[tuple[Sequence, InflightError | None]]:
        """The sequences whose grammar has been compiled since, or refused, and then why."""
        return [] if self._queue is None else self._queue.poll()

    def advance(self, committed: Iterable[Committed]) -> list[tuple[Sequence, InflightError]]:
        """Take the tokens that a step has appended; the sequences that cannot go on, and why."""
        failures: list[tuple[Sequence, InflightError]] = []
        if self._queue is None:
            return failures
        for each in committed:
            sequence = each.sequence
            if sequence.grammar is None or not each.token_ids:
                continue
            try:
                sequence.grammar.advance(each.token_ids)
                sequence.is_complete = sequence.grammar.is_finished
            except EngineError as error:
                failures.append((sequence, error))
        return failures

    def forget(self, group: SequenceGroup) -> None:
        """A request has ended; idempotent."""
        if self._queue is not None:
            self._queue.forget(group)
