"""Interface of grammars for the engine and the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from inflight.errors import InflightError

Masks = npt.NDArray[np.int32]
"""[rows, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i is allowed."""


class OutputGrammar(Protocol):
    """State of one sequence's output in its grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow."""

    def advance(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens, up to the first one that ends the output.

        Returns:
            How many of them belong to the output. An end token does not if nothing else was allowed
            to follow: it was sampled after a draft, and without drafts the output ends before it.

        Raises:
            EngineError: a token does not match, or the grammar hit a limit: the request fails.
        """

    def fill_masks(
        self, states: Sequence[Self], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Masks], dict[int, InflightError]]:
        """Masks of the allowed next tokens of each sequence, and after each of its drafts.

        Args:
            states: of different sequences of one model; `self` may be any of them.
            drafts: draft tokens of each sequence.

        Returns:
            For each sequence the masks of 1 + len(draft) rows; and by index the errors of sequences
            that failed.
        """
