"""Outputs of finished requests, in which later requests of the same salt look for matches."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from inflight.core.sequence import Sequence
from inflight.execution.drafters.suffix_automaton import Match, SuffixAutomaton

SEPARATOR = -1
"""Stands after each output: no match spans two, and no draft goes on past an end."""

_RELEVANT = 64
"""Last tokens of a text that are looked for in an automaton that is new to it."""


@dataclass(slots=True)
class _Outputs:
    """The outputs of one salt: when the newer ones are half of what is kept, they become the older
    ones, and the former older ones are dropped. An automaton cannot forget a part of its text."""

    newer: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    older: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    @property
    def num_tokens(self) -> int:
        return len(self.newer.tokens) + len(self.older.tokens)


class OutputCache:
    """Outputs by cache salt, the latest ones of the most recently used salts.

    Args:
        max_tokens: of all outputs together, separators included.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._by_salt: OrderedDict[str, _Outputs] = OrderedDict()
        self._num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Take in the output of a finished sequence; of one that is too long, its end."""
        salt, half = sequence.request.cache_salt, self._max_tokens // 2
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if not output or half < 2:
            return
        output = [*output[-(half - 1) :], SEPARATOR]
        own = self._by_salt.setdefault(salt, _Outputs())
        self._by_salt.move_to_end(salt)
        before = own.num_tokens
        if len(own.newer.tokens) + len(output) > half:
            own.newer, own.older = SuffixAutomaton(), own.newer
        for token in output:
            own.newer.append(token)
        self._num_tokens += own.num_tokens - before
        while self._num_tokens > self._max_tokens:
            _, dropped = self._by_salt.popitem(last=False)
            self._num_tokens -= dropped.num_tokens

    def automata_of(self, salt: str) -> tuple[SuffixAutomaton, ...]:
        """Those of a salt's outputs, the newer ones first; () if there are none."""
        own = self._by_salt.get(salt)
        if own is None:
            return ()
        self._by_salt.move_to_end(salt)
        return own.newer, own.older


# Weak, so that nothing but the cache keeps the outputs that count as its own.
_Matches = WeakKeyDictionary[SuffixAutomaton, Match]


class CachedMatches:
    """The longest suffixes of a growing text in the automata of its salt, which come and go."""

    def __init__(self) -> None:
        self._matches = _Matches()
        self._length = 0

    def follow(self, token_ids: list[int], automata: tuple[SuffixAutomaton, ...]) -> None:
        """Take in the new tokens.

        Args:
            token_ids: the text, with that of the last call at its beginning.
            automata: as `OutputCache.automata_of`.
        """
        former, self._matches = self._matches, _Matches()
        for automaton in automata:
            match, first = former.get(automaton), self._length
            if match is None:
                match, first = Match(), max(0, len(token_ids) - _RELEVANT)
            for token in token_ids[first:]:
                automaton.advance(match, token)
            self._matches[automaton] = match
        self._length = len(token_ids)

    def drafts(self, count: int, per_match: int, longer_than: int) -> list[int]:
        """What followed the longest match in an output, up to that output's end.

        Args:
            count: tokens at most.
            per_match: tokens at most for each one that matches.
            longer_than: of a match that counts, in tokens.
        """
        found: list[int] = []
        for automaton, match in self._matches.items():
            if match.length <= longer_than:
                continue
            longer_than = match.length
            begin = automaton.first_end(match) + 1
            found = list(automaton.tokens[begin : begin + min(count, per_match * match.length)])
            if SEPARATOR in found:
                del found[found.index(SEPARATOR) :]
        return found
