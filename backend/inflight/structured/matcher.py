"""Where one sequence stands in its grammar.

The library reports nothing by exceptions: a matcher that meets a token that does not fit, a limit
or a panic of its own goes into an error state, whose mask is "end here". Here every call is
followed by a look at that state. Two kinds of trouble are told apart:

- A lexer is full. It is shared by all copies of a grammar, which break together. That is nobody's
  fault: the grammar gets a new lexer and the sequence's tokens are taken again, at 2 us each.
- Anything else ends this request with an EngineError, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from inflight.errors import EngineError
from inflight.structured.grammar import Grammar, first_line
from inflight.structured.vocabulary import Vocabulary

T = TypeVar("T")

# Taking the tokens again happens on the engine's thread.
_MAX_RECOMPILE_S = 0.05


class Matcher:
    """A grammar and the output tokens that it has taken.

    The tokens that end an output are not part of any grammar: they may come exactly where the
    grammar may end, and nothing comes after one.

    Args:
        grammar: compiled for this vocabulary.
        vocabulary: of the model.
        end_ids: tokens that end this request's output; the model's own if None.

    Attributes:
        is_json: see Grammar.
        num_tokens: taken, and not rolled back.
        num_whitespace_bytes: of the white space that these end with.
        num_recoveries: how often the lexer was started anew.
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
        # Masks come with the bits of the vocabulary's own end tokens.
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
        """Whether what was taken is a whole match."""
        return self._ended or guarded(self.state.is_accepting)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._ended or (self.state.is_stopped() and not self.state.is_error())

    @property
    def has_ended(self) -> bool:
        """Whether an end token was taken."""
        return self._ended

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that follow.

        Raises:
            EngineError: one does not fit, or the grammar ran into a limit: the request is over.
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
        """Undo the last tokens, as if they had not been taken.

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
        """How many of these tokens may follow, one after the other. Takes none of them.

        Raises:
            EngineError: the grammar ran into a limit.
        """
        if self._ended:
            return 0
        body = self.before_end(token_ids)
        length = len(body)
        ends = length < len(token_ids) and token_ids[length] in self.end_ids
        # The library's own end, in place of any: it says whether the match is whole there.
        asked = [*body, self._stop_id] if ends else body
        if not asked:
            return 0
        if self.is_finished:  # the library takes nothing any more, not even an end
            return int(length == 0 and ends)
        accepted = guarded(lambda: self.state.validate_tokens(asked))
        if self.state.is_error():
            self.recover()
            accepted = guarded(lambda: self.state.validate_tokens(asked))
            if self.state.is_error():
                raise self.failure()
        return accepted

    def forced(self) -> list[int]:
        """Tokens that have to come next, whatever the model says; often none."""
        return [] if self.is_finished else guarded(self.state.compute_ff_tokens)

    def before_end(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens up to the first one that is not the library's: an end, or no token at all."""
        for position, id_ in enumerate(token_ids):
            if id_ in self.end_ids or not 0 <= id_ < self._size:
                return list(token_ids[:position])
        return list(token_ids)

    def _take(self, body: list[int]) -> int:
        """Take as many tokens as fit; how many those are."""
        if not body or self.is_finished:
            return 0
        taken = guarded(lambda: self.state.try_consume_tokens(body))
        if self.state.is_error():
            self.recover()
            taken = guarded(lambda: self.state.try_consume_tokens(body))
            if self.state.is_error():
                raise self.failure()
        for id_ in body[:taken]:
            self._tokens.append(id_)
            length = self._whitespace.get(id_)
            self.num_whitespace_bytes = 0 if length is None else self.num_whitespace_bytes + length
        return taken

    def recover(self) -> None:
        """After an error: the state of before it, on a new lexer.

        Raises:
            EngineError: that cannot help, or did not help at this very place.
        """
        expensive = self._grammar.compile_s > _MAX_RECOMPILE_S
        if expensive or self._recovered_at == len(self._tokens):
            raise self.failure()
        self._recovered_at = len(self._tokens)
        self.num_recoveries += 1
        body = self._tokens[: len(self._tokens) - self._ended]
        if self._generation == self._grammar.generation:  # else somebody else has done it
            guarded(self._grammar.renew)
        self._generation = self._grammar.generation
        self.state = guarded(self._grammar.start)
        if body and not guarded(lambda: self.state.consume_tokens(body)):
            raise self.failure()

    def failure(self) -> EngineError:
        """What to tell the request's sender. The library's words are short: see `first_line`."""
        why = first_line(self.state.get_error()) or "it took more than its limits allow"
        return EngineError(f"the request's grammar failed after {self.num_tokens} tokens: {why}")


def guarded(call: Callable[[], T]) -> T:
    """Call the library.

    Raises:
        EngineError: it panicked. Such an exception is none of `Exception`, so that it would pass
            by whoever keeps the engine alive.
    """
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, EngineError):
        raise
    except BaseException as error:
        raise EngineError(f"the request's grammar broke: {type(error).__name__}") from None
