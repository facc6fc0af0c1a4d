"""The grammar state of one sequence.

The library does not raise exceptions: on a token that does not match, a limit or a panic a matcher
enters an error state, whose mask is "end here". So every call is followed by a check of that state.
There are two kinds of failures:

- The lexer is full. It is shared by all copies of a grammar, which fail together, through no fault
  of the request: the grammar gets a new lexer and the tokens are consumed again, at 2 us each.
- Anything else fails this request, and only this one, with an EngineError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from inflight.errors import EngineError
from inflight.structured.grammar import Grammar, first_line
from inflight.structured.vocabulary import Vocabulary

T = TypeVar("T")

# Recompilation happens on the engine's thread.
_MAX_RECOMPILE_S = 0.05


class Matcher:
    """A grammar and the output tokens that it has consumed.

    End tokens are not part of the grammar: they are allowed exactly where the grammar may end, and
    nothing follows one.

    Args:
        grammar: compiled for this vocabulary.
        vocabulary: of the model.
        end_ids: tokens that end this request's output; the model's own if None.

    Attributes:
        is_json: see Grammar.
        num_tokens: consumed and not rolled back.
        num_whitespace_bytes: length of the trailing white space.
        num_recoveries: number of times the lexer was renewed.
    """

    def __init__(
        self, grammar: Grammar, vocabulary: Vocabulary, end_ids: Iterable[int] | None = None
    ) -> None:
        own = vocabulary.end_ids if end_ids is None else end_ids
        self.end_ids = frozenset(id_ for id_ in own if 0 <= id_ < vocabulary.size)
        self.is_json = grammar.is_json
        self.num_recoveries = 0
        self._grammar = grammar
        self._size = vocabulary.size
        self._stop_id = vocabulary.stop_id
        # The library's masks have the bits of the model's own end tokens.
        self.has_own_ends = self.end_ids != frozenset(vocabulary.end_ids)
        self._whitespace = vocabulary.whitespace
        self._tokens: list[int] = []
        self.num_whitespace_bytes = 0
        self._ended = False  # whether the last token is one of end_ids
        self._recovered_at = -1
        self._generation = grammar.generation
        self.state = guarded(grammar.start)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def may_end(self) -> bool:
        """Whether the consumed tokens are a complete match."""
        return self._ended or guarded(self.state.is_accepting)

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._ended or (self.state.is_stopped() and not self.state.is_error())

    @property
    def has_ended(self) -> bool:
        """Whether an end token was consumed."""
        return self._ended

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume the next tokens.

        Raises:
            EngineError: one does not match, or the grammar hit a limit: the request fails.
        """
        body = self.before_end(token_ids)
        taken = self._take(body) if not self._ended else 0
        ends = taken == len(body) < len(token_ids) and token_ids[taken] in self.end_ids
        if ends and self.may_end and not self._ended:
            self._ended = True
            self._tokens.append(token_ids[taken])
            self.num_whitespace_bytes = 0
            taken += 1
        if taken < len(token_ids):
            raise EngineError(
                f"token {token_ids[taken]} does not fit the request's grammar after "
                f"{self.num_tokens} tokens"
            )

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens.

        Raises:
            EngineError: the grammar broke, or there are not that many.
        """
        if not 0 <= num_tokens <= len(self._tokens):
            raise EngineError(
                f"{num_tokens} tokens cannot be rolled back; the grammar has taken "
                f"{len(self._tokens)}"
            )
        if num_tokens == 0:
            return
        inside = num_tokens - self._ended
        self._ended = False
        del self._tokens[-num_tokens:]
        self.num_whitespace_bytes = 0
        for id_ in reversed(self._tokens):
            if id_ not in self._whitespace:
                break
            self.num_whitespace_bytes += self._whitespace[id_]
        if inside and not guarded(lambda: self.state.rollback(inside)):
            self.recover()

    def count_accepted(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, in order, are allowed. Consumes none.

        Raises:
            EngineError: the grammar hit a limit.
        """
        if self._ended:
            return 0
        body = self.before_end(token_ids)
        length = len(body)
        ends = length < len(token_ids) and token_ids[length] in self.end_ids
        # The library's own end token instead: it is valid exactly where the match is complete.
        asked = [*body, self._stop_id] if ends else body
        if not asked:
            return 0
        if self.is_finished:  # the library consumes nothing more, not even an end
            return int(length == 0 and ends)
        accepted = guarded(lambda: self.state.validate_tokens(asked))
        if self.state.is_error():
            self.recover()
            accepted = guarded(lambda: self.state.validate_tokens(asked))
            if self.state.is_error():
                raise self.failure()
        return accepted

    def forced(self) -> list[int]:
        """Tokens forced by the grammar, independent of the model; often none."""
        return [] if self.is_finished else guarded(self.state.compute_ff_tokens)

    def before_end(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens up to the first that the library does not know: an end token, or no valid id."""
        for position, id_ in enumerate(token_ids):
            if id_ in self.end_ids or not 0 <= id_ < self._size:
                return list(token_ids[:position])
        return list(token_ids)

    def _take(self, body: list[int]) -> int:
        """Consume as many tokens as match; returns their number."""
        if not body or self.is_finished:
            return 0
        taken = guarded(lambda: self.state.try_consume_tokens(body))
        if self.state.is_error():
            self.recover()
            taken = guarded(lambda: self.state.try_consume_tokens(body))
            if self.state.is_error():
                raise self.failure()
        self.num_whitespace_bytes = self.whitespace_bytes(body[:taken])[-1]
        self._tokens += body[:taken]
        return taken

    def whitespace_bytes(self, draft: Sequence[int]) -> list[int]:
        """Length of the trailing white space now, and after each token of a draft."""
        lengths = [self.num_whitespace_bytes]
        for id_ in draft:
            length = self._whitespace.get(id_)
            lengths.append(0 if length is None else lengths[-1] + length)
        return lengths

    def recover(self) -> None:
        """After an error, restore the state on a new lexer.

        Raises:
            EngineError: recompiling is too slow, or did not help at this position.
        """
        expensive = self._grammar.compile_s > _MAX_RECOMPILE_S
        if expensive or self._recovered_at == len(self._tokens):
            raise self.failure()
        self._recovered_at = len(self._tokens)
        self.num_recoveries += 1
        body = self._tokens[: len(self._tokens) - self._ended]
        if self._generation == self._grammar.generation:  # else another sequence has done it
            guarded(self._grammar.renew)
        self._generation = self._grammar.generation
        self.state = guarded(self._grammar.start)
        if body and not guarded(lambda: self.state.consume_tokens(body)):
            raise self.failure()

    def failure(self) -> EngineError:
        """The error for the request's sender, with the library's message (see `first_line`)."""
        why = first_line(self.state.get_error()) or "it took more than its limits allow"
        return EngineError(f"the request's grammar failed after {self.num_tokens} tokens: {why}")


def guarded(call: Callable[[], T]) -> T:
    """Call the library.

    Raises:
        EngineError: it panicked. Such an exception is not a subclass of `Exception` and would
            otherwise end the engine's loop.
    """
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, EngineError):
        raise
    except BaseException as error:
        raise EngineError(f"the request's grammar broke: {type(error).__name__}") from None
