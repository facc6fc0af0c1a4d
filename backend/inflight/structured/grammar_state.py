"""A sequence's way through its grammar, as a runner needs it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.errors import EngineError
from inflight.structured.masks import MaskFiller, Rows
from inflight.structured.matcher import Matcher


@dataclass(frozen=True, slots=True)
class GrammarState:
    """Where a sequence stands, and who writes down what may follow.

    Attributes:
        matcher: its own.
        filler: shared by all sequences of a model.
    """

    matcher: Matcher
    filler: MaskFiller


def fill(
    states: Sequence[GrammarState], drafts: Sequence[Sequence[int]]
) -> tuple[list[Rows], dict[int, EngineError]]:
    """Which tokens may come next in each sequence, and after each of its drafts.

    Args:
        states: of different sequences of one model.
        drafts: of each sequence, tokens that may turn out to come next.

    Returns:
        For each sequence [1 + len(draft), ceil(vocab_size / 32)] int32, see `MaskFiller.fill`; and
        by index the reason why a sequence cannot go on.
    """
    if not states:
        return [], {}
    filler = states[0].filler
    starts = [0, *itertools.accumulate(1 + len(draft) for draft in drafts)]
    out = np.empty((starts[-1], filler.num_words), np.int32)
    failures = filler.fill([state.matcher for state in states], out, drafts)
    return [out[a:b] for a, b in itertools.pairwise(starts)], failures
