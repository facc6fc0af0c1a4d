"""The grammars of an engine's requests; llguidance is imported with the first one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from inflight.core.batch import Committed
from inflight.core.output_constraint import StructuredOutput
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.errors import EngineError, InflightError
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.engine.grammar_queue import GrammarQueue


class Grammars:
    """Compiles grammars and advances them with their outputs.

    Args:
        tokenizer: the model's; None if no request may have a grammar (see `engine.admission`).
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
        """Request a sequence's grammar. True if attached at once; otherwise `poll` reports it.

        Raises:
            InflightError: it was rejected.
        """
        if self._queue is None:
            assert self._tokenizer is not None
            from inflight.engine.grammar_queue import GrammarQueue  # importing llguidance is slow

            self._queue = GrammarQueue(self._tokenizer, self._vocab_size, self._end_ids)
        return self._queue.submit(sequence, constraint)

    def poll(self) -> list[tuple[Sequence, InflightError | None]]:
        """Sequences whose grammar was compiled or rejected since the last call, with the error."""
        return [] if self._queue is None else self._queue.poll()

    def advance(self, committed: list[Committed]) -> list[tuple[Sequence, InflightError]]:
        """Advance by the tokens that a step appended; returns failed sequences with errors.

        Args:
            committed: changed in place: tokens that do not belong to an output are removed.
        """
        failures: list[tuple[Sequence, InflightError]] = []
        if self._queue is None:
            return failures
        for place, each in enumerate(committed):
            sequence = each.sequence
            if sequence.grammar is None or not each.token_ids:
                continue
            try:
                num_tokens = sequence.grammar.advance(each.token_ids)
                sequence.is_complete = sequence.grammar.is_finished
            except EngineError as error:
                failures.append((sequence, error))
                continue
            if num_tokens < len(each.token_ids):
                own = each.token_ids[:num_tokens]
                committed[place] = msgspec.structs.replace(each, token_ids=own)
        return failures

    def forget(self, group: SequenceGroup) -> None:
        """Drop a finished request; idempotent."""
        if self._queue is not None:
            self._queue.forget(group)
