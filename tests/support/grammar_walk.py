"""Random outputs that a grammar allows, as from an untrained model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inflight.structured.masks import MaskFiller
from inflight.structured.matcher import Matcher
from inflight.structured.vocabulary import Vocabulary

# From the best to the worst; what is not here comes after all of these.
_CLOSING = (b'"', b"@", b".", b"}", b"]", b",", b":", b"null", b"0")


def allowed(row: NDArray[np.int32]) -> NDArray[np.intp]:
    """The ids whose bits are set in a mask."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


class Walker:
    """Picks uniformly among the allowed tokens, and after some steps the one that closes most."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._filler = MaskFiller(vocabulary)
        self._ends = set(vocabulary.end_ids)
        rank = {text: i for i, text in enumerate(_CLOSING)}
        self._cost = np.array([rank.get(text, len(rank)) for text in vocabulary.tokens])
        self._short = np.array([len(text) <= 2 for text in vocabulary.tokens])
        self._cost[vocabulary.end_ids] = -1

    def mask(self, matcher: Matcher) -> NDArray[np.int32]:
        out = np.zeros((1, self._vocabulary.num_words), np.int32)
        failures = self._filler.fill([matcher], out)
        assert not failures, failures[0]
        return out[0]

    def walk(
        self, matcher: Matcher, rng: random.Random, free_steps: int = 12, max_steps: int = 400
    ) -> tuple[list[int], bool]:
        """Tokens that the matcher took, and whether the last of them ended it.

        Args:
            free_steps: picked uniformly before closing begins.
        """
        taken: list[int] = []
        for step in range(max_steps):
            ids = allowed(self.mask(matcher))
            assert len(ids), f"stuck after {self.text(taken)!r}"
            if step >= free_steps:
                ids = self._closing(ids, rng)
            token = int(ids[rng.randrange(len(ids))])
            assert matcher.count_accepted([token]) == 1
            matcher.advance([token])
            taken.append(token)
            if matcher.has_ended:
                return taken, True
        return taken, False

    def _closing(self, ids: NDArray[np.intp], rng: random.Random) -> NDArray[np.intp]:
        # Not always: a string may need some other letter before it can end.
        if rng.random() < 0.2 and self._short[ids].any():
            return ids[self._short[ids]]
        costs = self._cost[ids]
        return ids[costs == costs.min()]

    def text(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._vocabulary.tokens[i] for i in token_ids if i not in self._ends)
