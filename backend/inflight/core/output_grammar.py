"""What an engine and a runner need of the grammar that an output must match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from inflight.errors import InflightError

Masks = npt.NDArray[np.int32]
"""[rows, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i is allowed."""


class OutputGrammar(Protocol):
    """Where one sequence's output stands in its grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end may follow."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that follow, up to the first one that ends the output.

        Raises:
            EngineError: one does not fit, or the grammar ran into a limit: the request is over.
        """

    def fill_masks(
        self, states: Sequence[Self], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Masks], dict[int, InflightError]]:
        """Which tokens may come next in each sequence of a batch, and after each of its drafts.

        Args:
            states: of different sequences of one model; any of them may be asked.
            drafts: of each sequence, tokens that may turn out to come next.

        Returns:
            For each sequence the masks of 1 + len(draft) rows; and by index the reason why a
            sequence cannot go on.
        """
