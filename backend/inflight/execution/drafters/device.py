"""Guessing on the GPU, in the stream of the steps: so that nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inflight.config import EngineConfig
from inflight.execution.device_batch import DeviceBatch
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.kv.cache import KVCache
from inflight.models.layers.attention import ForwardInputs
from inflight_kernels.ops import drafting, sampling

if TYPE_CHECKING:
    from inflight.models.decoder_cuda import Decoder, DecoderSettings


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
        progress: called with what is loading and the fraction of it that is there.
    """

    model: Decoder
    rows: ForwardInputs
    batch: DeviceBatch
    workspace: sampling.Workspace
    config: EngineConfig
    settings: DecoderSettings
    max_drafts: int
    progress: Callable[[str, float], None]


class DeviceDrafter:
    """Guesses what follows what a step has just chosen. This one has no guess.

    In each step: `forward`, the choice of tokens, `update`; then `draft`, if anybody wants drafts.

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
        """Record `draft` for so many chunks each, on nobody's tokens; ascending."""


class NgramDrafter(DeviceDrafter):
    """Finds the latest earlier place of the last tokens (see `drafters.ngram`)."""

    def __init__(self, max_match: int, min_match: int) -> None:
        super().__init__()
        self._max_match = max_match
        self._min_match = min_match

    def draft(self, batch: DeviceBatch, num_chunks: int, num_drafts: int) -> None:
        state = batch.state
        assert state.history is not None
        drafting.draft_ngram(
            batch.step.sample_slots[:num_chunks],
            state.last_positions,
            state.history,
            state.drafts,
            self._max_match,
            self._min_match,
            pdl=True,
        )


def kernels_of(
    source: DrafterSpec, config: EngineConfig, settings: DecoderSettings
) -> list[tuple[str, str]]:
    """Stem and name of the kernels that a drafter may launch, besides those of its target.

    Args:
        source: of the drafter.
        config: the engine's settings.
        settings: of its target.
    """
    if source.settings.method == "ngram":
        return drafting.kernels_of(passes=False)
    from inflight.execution.drafters import device_model

    return device_model.kernels_of(source, config, settings)


def build(source: DrafterSpec, target: DeviceTarget) -> DeviceDrafter:
    """The drafter on the GPU, with its weights.

    Raises:
        ConfigError: the weights are damaged or do not fit the settings, or no kernel is there for
            them.
    """
    settings = source.settings
    if settings.method == "ngram":
        return NgramDrafter(settings.prompt_lookup_max, settings.prompt_lookup_min)
    from inflight.execution.drafters import device_model

    if settings.method == "eagle3":
        return device_model.Eagle3Drafter(source, target)
    return device_model.ModelDrafter(source, target)
