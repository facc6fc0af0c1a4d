"""Finds the next tokens that would repeat earlier parts of a sequence: n-gram bans and DRY.

Each class keeps an incremental index of the committed tokens, so that a step costs what it finds,
not the sequence's length. Draft tokens (`tail`) are evaluated on top and not added to the index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_DRY_PENALTY = 1e4
"""More than any logit: powers for long repetitions would overflow float32."""

MAX_DRY_EXPONENT = 50
"""Longer repetitions count as exceeding the allowed length by this many tokens."""

_ROWS = 1024  # earlier occurrences compared at a time
_NO_PLACES = array("i")


class RepeatedNgrams:
    """Finds the tokens that would complete an n-gram that occurred before.

    Args:
        size: n, at least 2.
    """

    def __init__(self, size: int) -> None:
        self._before = size - 1  # tokens of an n-gram but its last
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._seen = 0

    def fork(self) -> RepeatedNgrams:
        """A fresh index for a sequence that may diverge; it indexes the tokens again."""
        return RepeatedNgrams(self._before + 1)

    def banned(self, token_ids: list[int], tail: Sequence[int] = ()) -> set[int]:
        """The tokens banned after token_ids + tail.

        Args:
            token_ids: all of the sequence; extends those of the previous call.
            tail: draft tokens.
        """
        self._extend(token_ids)
        before, num_known = self._before, len(token_ids)
        if num_known + len(tail) < before:
            return set()
        # N-grams that include a draft token start at most this far before the first draft.
        recent = [*token_ids[max(0, num_known - before) :], *tail]
        gram = tuple(recent[len(recent) - before :])
        found = set(self._next.get(gram, ()))
        for last in range(max(before, len(recent) - len(tail)), len(recent)):
            if tuple(recent[last - before : last]) == gram:
                found.add(recent[last])
        return found

    def _extend(self, token_ids: list[int]) -> None:
        before = self._before
        for last in range(max(self._seen, before), len(token_ids)):
            gram = tuple(token_ids[last - before : last])
            self._next.setdefault(gram, set()).add(token_ids[last])
        self._seen = max(self._seen, len(token_ids))


class DryPenalty:
    """DRY: penalises each token that would continue a repetition (p-e-w, text-generation-webui
    5677).

    A token's repetition is the longest suffix of the sequence, without breakers, that occurred
    before followed by this token; the two occurrences may overlap.

    Args:
        multiplier, base, allowed_length: a repetition of n >= allowed_length tokens costs
            multiplier * base ** (n - allowed_length), MAX_DRY_PENALTY at most.
        last_n: number of last tokens considered; -1 for all.
        breakers: tokens that end a repetition and are never penalised.
    """

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int = -1,
        breakers: frozenset[int] = frozenset(),
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed = allowed_length
        self._last_n = last_n
        self._breakers = breakers
        self._tokens = np.empty(256, np.int32)  # [0, _seen), and room
        self._seen = 0
        self._unbroken = 0  # the position after the last breaker
        # String of `allowed_length` tokens without breakers -> positions of tokens that follow it.
        self._places: dict[tuple[int, ...], array[int]] = {}

    def penalties(self, token_ids: list[int], tail: Sequence[int] = ()) -> dict[int, float]:
        """Penalties to subtract from the logits of the tokens after token_ids + tail.

        Args:
            token_ids: all of the sequence; extends those of the previous call.
            tail: draft tokens.
        """
        self._extend(token_ids)
        known, end = self._seen, self._seen + len(tail)
        self._reserve(end)
        tokens = self._tokens[:end]
        tokens[known:] = tail
        unbroken = self._unbroken
        for position, token_id in enumerate(tail, known):
            if token_id in self._breakers:
                unbroken = position + 1
        longest = min(self._allowed + MAX_DRY_EXPONENT, end - unbroken)
        if longest < self._allowed:
            return {}
        start = 0 if self._last_n < 0 else max(0, end - self._last_n)
        places = self._occurrences(tokens, known, start)
        found: dict[int, int] = {}
        while len(places):
            some, places = places[-_ROWS:], places[:-_ROWS]
            lengths = self._lengths(tokens, some, start, longest)
            for token_id, length in zip(tokens[some].tolist(), lengths.tolist(), strict=True):
                if length > found.get(token_id, 0):
                    found[token_id] = length
            if len(places):  # drop further occurrences of tokens at the maximum length
                saturated = [token_id for token_id, length in found.items() if length == longest]
                places = places[~np.isin(tokens[places], saturated)]
        return {
            token_id: self._penalty(length)
            for token_id, length in found.items()
            if token_id not in self._breakers
        }

    def _penalty(self, length: int) -> float:
        power = self._base ** (length - self._allowed)
        return min(self._multiplier * power, MAX_DRY_PENALTY)

    def _occurrences(
        self, tokens: npt.NDArray[np.int32], known: int, start: int
    ) -> npt.NDArray[np.int32]:
        """Positions after earlier occurrences of the last `allowed_length` tokens, ascending."""
        allowed, end = self._allowed, len(tokens)
        gram = tuple(tokens[end - allowed :].tolist())
        places = np.frombuffer(self._places.get(gram, _NO_PLACES), np.int32)
        recent = tokens[max(0, known - allowed) :].tolist()
        base = end - len(recent)
        drafted = [
            place
            for place in range(max(known, allowed), end)
            if tuple(recent[place - allowed - base : place - base]) == gram
        ]
        if drafted:
            places = np.concatenate([places, np.array(drafted, np.int32)])
        return places[np.searchsorted(places, start + allowed) :]

    def _lengths(
        self,
        tokens: npt.NDArray[np.int32],
        places: npt.NDArray[np.int32],
        start: int,
        longest: int,
    ) -> npt.NDArray[np.int64]:
        """Length of the match, at most `longest`, between the end and each earlier place."""
        back = np.arange(1, longest + 1)
        before = places[:, np.newaxis] - back
        same = tokens[np.maximum(before, 0)] == tokens[len(tokens) - back]
        same &= before >= start
        lengths: npt.NDArray[np.int64] = np.where(same.all(1), longest, same.argmin(1))
        return lengths

    def _extend(self, token_ids: list[int]) -> None:
        """Add new tokens to the index."""
        known, end, allowed = self._seen, len(token_ids), self._allowed
        if end <= known:
            return
        self._reserve(end)
        self._tokens[known:end] = token_ids[known:]
        for place in range(known, end):
            if place - self._unbroken >= allowed:
                gram = tuple(token_ids[place - allowed : place])
                self._places.setdefault(gram, array("i")).append(place)
            if token_ids[place] in self._breakers:
                self._unbroken = place + 1
        self._seen = end

    def _reserve(self, size: int) -> None:
        if size > len(self._tokens):
            grown = np.empty(2 * size, np.int32)
            grown[: self._seen] = self._tokens[: self._seen]
            self._tokens = grown
