"""A sequence's way through its grammar, as an engine and a runner need it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.errors import InflightError
from inflight.structured.masks import MaskFiller, Rows
from inflight.structured.matcher import Matcher


@dataclass(frozen=True, slots=True)
class GrammarState:
    """State of a sequence in its grammar (see `core.output_grammar`), and the writer of its masks.

    Attributes:
        matcher: its own.
        filler: shared by all sequences of a model.
    """

    matcher: Matcher
    filler: MaskFiller

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return self.matcher.is_finished

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take the tokens that follow, up to the first one that ends the output; returns how many
        belong to it (see `core.output_grammar`).

        Raises:
            EngineError: one does not fit, or the grammar ran into a limit: the request is over.
        """
        for place, token_id in enumerate(token_ids):
            if token_id in self.matcher.end_ids:
                if place:
                    self.matcher.advance(token_ids[:place])
                    if self.matcher.is_finished:
                        return place
                self.matcher.advance([token_id])
                return place + 1
        self.matcher.advance(token_ids)
        return len(token_ids)

    def fill_masks(
        self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Rows], dict[int, InflightError]]:
        """The masks of a batch, see `core.output_grammar.OutputGrammar` and `MaskFiller.fill`."""
        starts = [0, *itertools.accumulate(1 + len(draft) for draft in drafts)]
        out = np.empty((starts[-1], self.filler.num_words), np.int32)
        failures = self.filler.fill([state.matcher for state in states], out, drafts)
        return [out[a:b] for a, b in itertools.pairwise(starts)], {**failures}
