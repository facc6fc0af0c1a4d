"""Registry entry of a drafting method, and the specification of a configured drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, KVDtype, SpeculativeConfig
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Drafter, Target
from inflight.kv.layout import KVLayout
from inflight.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A configured drafter, resolved and validated before anything is loaded.

    Attributes:
        method: its registry entry.
        settings: speculative_config.
        checkpoint: of its own weights, if any.
        model: specification of its own KV: a draft model, or a head's one layer; None if the
            drafter has no KV of its own.
    """

    method: DraftMethod
    settings: SpeculativeConfig
    checkpoint: Checkpoint | None = None
    model: ModelSpec | None = None

    def scratch_bytes(self, config: EngineConfig, model: ModelSpec, kv_dtype: KVDtype) -> int:
        """GPU memory for drafts past the end of a sequence's block table: one scratch block each,
        after the pool's blocks in the cache that the drafter writes to.
        """
        if not self.method.writes_kv:
            return 0
        layout = (self.model or model).kv_layout(kv_dtype)
        return config.max_num_seqs * layout.block_bytes(config.block_size)

    def block_bytes(self, config: EngineConfig, kv_dtype: KVDtype) -> int:
        """Bytes of its own KV cache per block of the model's."""
        if self.model is None:
            return 0
        return self.model.kv_layout(kv_dtype).block_bytes(config.block_size)


def kv_layout(model: ModelSpec, drafter: DrafterSpec | None, dtype: KVDtype) -> KVLayout:
    """The layout of a model's KV cache.

    Blocks that no sliding window reaches any more are freed, unless a drafter writes KV: the blocks
    of its own cache are those of the model's sequences, and its layers may attend to all tokens.
    """
    keeps_all = drafter is not None and drafter.method.writes_kv
    return model.kv_layout(dtype, frees_windows=not keeps_all)


def _read_nothing(spec: DrafterSpec, checkpoint: Checkpoint, model: ModelSpec) -> DrafterSpec:
    return spec


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A drafting method: its requirements, and how it is loaded.

    Attributes:
        load: load the drafter on the CPU. Raises ConfigError: its weights are corrupt or do not
            match its settings.
        load_on_device: load the drafter on a GPU. Raises ConfigError: the same, or not supported by
            the kernels.
        read: complete a spec from its checkpoint, given a spec with the path, and the target's
            checkpoint and spec. Raises ConfigError: corrupt, or for another model.
        requires_model: it has weights of its own: requires the setting `model`.
        requires_num_layers: it is the target's first layers: requires the setting `num_layers`.
        needs_history: on a GPU it reads the tokens of its sequences.
        writes_kv: its layers write KV for the drafts, on a GPU also where sequences may have no
            block.
        shares_target_kv: this KV is in the target's cache.
        caches_outputs: it can draft from the outputs of earlier requests, too: uses the setting
            `suffix_decoding_max_cached_tokens`.
        load_on_host: with a GPU, load the drafter of sequences that need committed tokens; None if
            they cannot have drafts.
    """

    load: Callable[[DrafterSpec, Target], Drafter]
    load_on_device: Callable[[DrafterSpec, DeviceTarget], DeviceDrafter]
    read: Callable[[DrafterSpec, Checkpoint, ModelSpec], DrafterSpec] = _read_nothing
    requires_model: bool = False
    requires_num_layers: bool = False
    needs_history: bool = False
    writes_kv: bool = False
    shares_target_kv: bool = False
    caches_outputs: bool = False
    load_on_host: Callable[[DrafterSpec], Drafter] | None = None
