"""Interfaces of drafters on CPU and GPU, and of their targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from inflight.config import EngineConfig
from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize

if TYPE_CHECKING:
    import torch

    from inflight.execution.batch.device_batch import DeviceBatch
    from inflight.kv.cache import KVCache
    from inflight.models.decoder_cpu import Decoder
    from inflight.models.decoder_cuda import Decoder as DeviceDecoder
    from inflight.models.decoder_cuda import DecoderSettings
    from inflight.models.layers.attention import ForwardInputs
    from inflight_kernels.ops.sampling import Workspace


class Drafter(Protocol):
    """Drafts on the host, where all tokens are known.

    In each step: `propose`, the model's own pass, sampling, `update`.

    Attributes:
        caches: its own KV caches, with the same block ids as the model's. A copy of a block must be
            made in all of them.
        from_outputs: ids of the requests whose drafts in the last `propose` are from the outputs of
            earlier requests.
    """

    caches: list[KVCache]
    from_outputs: set[int]

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        """Draft tokens for each chunk's sequence, at most num_drafts."""

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        """Update its state with what the model has computed.

        Args:
            batch: of the step.
            arrays: all rows that the model computed, drafts included.
            output: the sampled tokens.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence; idempotent."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target model, and how it runs.

    Attributes:
        model: on the CPU.
        cache: its KV cache.
        config: the engine's settings.
        dtype: of weights and activations.
        max_len: maximum sequence length.
        num_blocks: of the cache.
        progress: called with what is loading and the loaded fraction.
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
    """The target model, and how its steps run.

    Attributes:
        model: on the GPU.
        rows: inputs of its steps.
        batch: slots of sequences.
        workspace: the sampler's, free once a step has sampled.
        config: the engine's settings.
        settings: of the model.
        max_drafts: of a sequence.
        progress: called with what is loading and the loaded fraction.
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
    """Drafts on the GPU, in the stream of the steps, so that nothing waits for the host. This base
    class drafts nothing.

    In each step: `forward`, sampling, `update`; then `draft`, if any sequence has drafts.

    Attributes:
        caches: its own KV caches, with the same block ids as the model's.
        has_update: whether `update` does anything.
        is_search: it searches the texts, which takes next to nothing: `draft` then follows each
            step with a sequence whose number of drafts adapts, for its report.
    """

    has_update = False
    is_search = False

    def __init__(self) -> None:
        self.caches: list[KVCache] = []

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        """Allocate its KV caches.

        Args:
            cache: the model's; if the drafter uses it, one scratch block per sequence follows
                the pool's blocks (see `DrafterSpec.scratch_bytes`).
            num_blocks: blocks of the pool.

        Raises:
            ConfigError: out of memory.
        """

    def forward(self, size: StepSize) -> None:
        """Launch its part of a step's forward pass, after the model's."""

    def update(self, size: StepSize) -> None:
        """Launch its work after the step's tokens are sampled."""

    def draft(self, batch: DeviceBatch, num_chunks: int, num_drafts: int) -> None:
        """Launch the work that fills `BatchState.drafts` for the sequences of the last step.

        Args:
            batch: after `end_step`.
            num_chunks: of that step.
            num_drafts: maximum over its sequences; 0 if a search is only to report.
        """

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Capture `draft` for each of these numbers of chunks, ascending, on empty slots."""
