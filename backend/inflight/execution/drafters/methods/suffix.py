"""Drafts by suffix: what most often followed the longest earlier occurrence of the last tokens.

SuffixDecoding (Oliaro et al., arXiv:2411.04975) over the tokens of the sequence itself. While
`ngram` copies the tokens after the latest match, this follows the most frequent continuation and
ends the draft where that becomes improbable, so that fewer drafts are rejected. Effective where
text repeats with variations: agents' loops, tables, code.

It searches on the host, where the tokens of the last step must be known: on CPUs only.
"""

from __future__ import annotations

from array import array
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.errors import ConfigError
from inflight.execution.drafters.drafter import Target
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.kv.cache import KVCache

MAX_MATCH = 64
"""Maximum length of a match, the depth of the paper's trees."""

MIN_PROBABILITY = 0.1
"""A draft ends before its estimated probability falls below this."""


class SuffixDrafter:
    """Finds all earlier occurrences of a sequence's longest repeated suffix, and drafts their most
    frequent continuation."""

    def __init__(self) -> None:
        self.caches: list[KVCache] = []
        self._histories: dict[int, array[int]] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        return [
            continuation(self._tokens_of(chunk.sequence), chunk.num_drafts)
            if chunk.num_drafts
            else []
            for chunk in chunks
        ]

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        """Nothing to update: it reads the sequences."""

    def forget(self, sequence: Sequence) -> None:
        self._histories.pop(sequence.request_id, None)

    def _tokens_of(self, sequence: Sequence) -> npt.NDArray[np.int64]:
        """[length]; only the new ones are copied."""
        history = self._histories.setdefault(sequence.request_id, array("q"))
        history.extend(sequence.token_ids[len(history) :])
        return np.frombuffer(history, np.int64)


def continuation(tokens: npt.NDArray[np.int64], count: int) -> list[int]:
    """The most frequent continuation of the longest suffix that occurs earlier in the tokens.

    Each draft token is the most frequent one after the occurrences that match the suffix and the
    draft so far; among equally frequent ones, the one that occurred last. Its relative frequency is
    its estimated probability, and that of a draft is the product.

    Args:
        tokens: [length].
        count: maximum number of tokens to draft.

    Returns:
        Up to `count` tokens; none if the last token is new.
    """
    ends = _longest_matches(tokens)
    drafts: list[int] = []
    probability = 1.0
    while len(drafts) < count:
        ends = ends[ends + 1 < len(tokens)] + 1  # positions of the next token
        if not len(ends):
            break
        following, last_places, counts = np.unique(
            tokens[ends][::-1], return_index=True, return_counts=True
        )
        best = int(np.lexsort((last_places, -counts))[0])
        probability *= float(counts[best]) / len(ends)
        if probability < MIN_PROBABILITY:
            break
        drafts.append(int(following[best]))
        ends = ends[tokens[ends] == following[best]]
    return drafts


def _longest_matches(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ascending end positions of the earlier occurrences of the longest repeated suffix."""
    length = len(tokens)
    ends = np.flatnonzero(tokens[: length - 1] == tokens[length - 1])
    for matched in range(2, MAX_MATCH + 1):
        longer = ends[ends >= matched - 1]
        longer = longer[tokens[longer - matched + 1] == tokens[length - matched]]
        if not len(longer):
            break
        ends = longer
    return ends


def _load(spec: DrafterSpec, target: Target) -> SuffixDrafter:
    return SuffixDrafter()


def _refuse_device(*operands: object) -> NoReturn:
    raise ConfigError(
        "speculative_config.method: suffix is not supported on GPUs; allowed: another method, or "
        "device: cpu"
    )


METHOD = DraftMethod(load=_load, load_on_device=_refuse_device)
