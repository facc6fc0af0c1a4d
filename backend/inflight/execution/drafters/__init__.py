"""Guessing the next tokens of a sequence; the model then checks all guesses in one step.

A drafter may be as wrong as it likes: a draft counts only where the model itself chooses the same
token, with the random number that belongs to its position. So an output does not depend on whether,
how and by whom anything was drafted; only its speed does. A drafter that chooses as the model does,
with the same number, is right more often.

This is the CPU's side; `device` is the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inflight.config import EngineConfig
from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.execution.drafters.drafter_spec import DrafterSpec

if TYPE_CHECKING:
    import torch

    from inflight.kv.cache import KVCache
    from inflight.models.decoder_cpu import Decoder


class Drafter(Protocol):
    """Guesses on the host, where all tokens are known.

    In each step: `propose`, the model's own pass, the choice of tokens, `update`.

    Attributes:
        caches: keys and values of its own, in the blocks of the same ids as the model's. Whoever
            copies a block of the one copies that of the other.
    """

    caches: list[KVCache]

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        """The tokens that may follow each chunk's sequence: at most num_drafts; fewer is fine."""

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        """Take in what the model has computed.

        Args:
            batch: of the step.
            arrays: all rows that the model computed, drafts included.
            output: what it chose.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended; idempotent."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is drafted for, and how it runs.

    Attributes:
        model: on the CPU.
        cache: its keys and values.
        config: the engine's settings.
        dtype: of weights and activations.
        max_len: the longest sequence.
        num_blocks: of the cache.
        progress: called with what is loading and the fraction of it that is there.
    """

    model: Decoder
    cache: KVCache
    config: EngineConfig
    dtype: torch.dtype
    max_len: int
    num_blocks: int
    progress: Callable[[str, float], None]


def build(source: DrafterSpec, target: Target) -> Drafter:
    """The drafter on the host.

    Raises:
        ConfigError: its weights are damaged or do not fit its settings.
    """
    settings = source.settings
    if settings.method == "ngram":
        from inflight.execution.drafters.ngram import NgramDrafter

        return NgramDrafter(settings.prompt_lookup_max, settings.prompt_lookup_min)
    if settings.method == "eagle3":
        from inflight.execution.drafters.eagle3 import Eagle3Drafter

        return Eagle3Drafter.load(source, target)
    from inflight.execution.drafters.draft_model import ModelDrafter

    if settings.method == "self":
        return ModelDrafter(target.model, target.cache, settings.num_layers)
    return ModelDrafter.load(source, target)
