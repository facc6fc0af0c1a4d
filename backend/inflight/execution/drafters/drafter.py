"""What drafters are on either device, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from inflight.config import EngineConfig
from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from inflight.execution.device_batch import DeviceBatch
    from inflight.kv.cache import KVCache
    from inflight.models.decoder_cpu import Decoder
    from inflight.models.decoder_cuda import Decoder as DeviceDecoder
    from inflight.models.decoder_cuda import DecoderSettings
    from inflight.models.layers.attention import ForwardInputs
    from inflight_kernels.ops.sampling import Workspace


class Drafter(Protocol):
    """Drafts on the host, where all tokens are known.

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
        progress: called with what is loading and the fraction of it that is loaded.
    """

    model: Decoder
    cache: KVCache
    config: EngineConfig
    dtype: torch.dtype
    max_len: int
    num_blocks: int
    progress: Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """The model that is drafted for, and how its steps run.

    Attributes:
        model: on the GPU.
        rows: of its steps.
        batch: slots of sequences.
        workspace: of the sampler, which is free when a step has chosen.
        config: the engine's settings.
        settings: of the model.
        max_drafts: of a sequence.
        progress: called with what is loading and the fraction of it that is loaded.
    """

    model: DeviceDecoder
    rows: ForwardInputs
    batch: DeviceBatch
    workspace: Workspace
    config: EngineConfig
    settings: DecoderSettings
    max_drafts: int
    progress: Callable[[str, float], None]


class DeviceDrafter:
    """Drafts on the GPU, in the stream of the steps, so that nothing waits for the host. This one
    drafts nothing.

    In each step: `forward`, the choice of tokens, `update`; then `draft`, if any sequence is to
    have drafts.

    Attributes:
        caches: keys and values of its own, in the blocks of the same ids as the model's.
        has_update: whether `update` does anything.
    """

    has_update = False

    def __init__(self) -> None:
        self.caches: list[KVCache] = []

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        """Take the memory for keys and values.

        Args:
            cache: the model's; after its blocks it has one for each sequence that the drafter may
                write to, if the drafter uses this cache (see `DrafterSpec.scratch_bytes`).
            num_blocks: that sequences can have.

        Raises:
            ConfigError: there is not that much memory.
        """

    def forward(self, num_tokens: int, num_chunks: int, max_q_len: int) -> None:
        """Launch what belongs to a step's forward pass, after the model's own."""

    def update(self, num_tokens: int, num_chunks: int, max_q_len: int) -> None:
        """Launch what can be done when the step has chosen its tokens."""

    def draft(self, batch: DeviceBatch, num_chunks: int, num_drafts: int) -> None:
        """Launch the work that fills `BatchState.drafts` of the sequences of the last step.

        Args:
            batch: after `end_step`.
            num_chunks: of that step.
            num_drafts: that any of them is to have.
        """

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Record `draft` for so many chunks each, on empty slots; ascending."""
