"""What would repeat what stands in a sequence already: of its tokens so far, which next ones.

Each class keeps an index that grows with the tokens that are committed, so that a step costs what
it finds, not what the sequence is long. Drafted tokens (`tail`) are looked at on top of it and
leave no trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_DRY_PENALTY = 1e4
"""More than any logit has: powers of long repetitions would leave the range of float32."""

MAX_DRY_EXPONENT = 50
"""A longer repetition counts as one that exceeds the allowed length by so many tokens."""

_ROWS = 1024  # earlier occurrences that are looked at at a time
_NO_PLACES = array("i")


class RepeatedNgrams:
    """Which tokens would complete an n-gram that stands in the sequence already.

    Args:
        size: n, at least 2.
    """

    def __init__(self, size: int) -> None:
        self._before = size - 1  # tokens of an n-gram but its last
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._seen = 0

    def fork(self) -> RepeatedNgrams:
        """One for a sequence that may go on otherwise; it reads its tokens anew."""
        return RepeatedNgrams(self._before + 1)

    def banned(self, token_ids: list[int], tail: Sequence[int] = ()) -> set[int]:
        """The tokens that may not follow token_ids + tail.

        Args:
            token_ids: all of the sequence; those of the call before, and perhaps more.
            tail: drafted tokens.
        """
        self._extend(token_ids)
        before, num_known = self._before, len(token_ids)
        if num_known + len(tail) < before:
            return set()
        # What a drafted token is part of begins at most this far before the first of them.
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
    """DRY: what each token loses that would continue a repetition (p-e-w, text-generation-webui
    5677).

    A token's repetition is the longest string, without breakers, that the sequence ends with and
    that stood in it before with this token after it; the two may overlap.

    Args:
        multiplier, base, allowed_length: a repetition of n >= allowed_length tokens costs
            multiplier * base ** (n - allowed_length), MAX_DRY_PENALTY at most.
        last_n: how many last tokens of the sequence count; -1 for all.
        breakers: tokens that no repetition has in it, and that are not penalized.
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
        """What to subtract from the logits of the tokens that may follow token_ids + tail.

        Args:
            token_ids: all of the sequence; those of the call before, and perhaps more.
            tail: drafted tokens.
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
            if len(places):  # of tokens that cannot get longer repetitions, the rest is no matter
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
        """Where the last `allowed_length` tokens stood before: positions after them, ascending."""
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
        """For how many tokens, at most `longest`, the end stands before each place too."""
        back = np.arange(1, longest + 1)
        before = places[:, np.newaxis] - back
        same = tokens[np.maximum(before, 0)] == tokens[len(tokens) - back]
        same &= before >= start
        lengths: npt.NDArray[np.int64] = np.where(same.all(1), longest, same.argmin(1))
        return lengths

    def _extend(self, token_ids: list[int]) -> None:
        """Put tokens into the index that are new in it."""
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
