"""A method of drafting as the registry knows it, and a drafter that settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint
from inflight.config import Dtype, EngineConfig, SpeculativeConfig
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Drafter, Target
from inflight.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter that settings ask for, found and checked before anything is loaded.

    Attributes:
        method: its entry.
        settings: what they say.
        checkpoint: where its weights are, if it has any of its own.
        model: the shape of what keeps keys and values of its own: a smaller model, or a head's one
            layer; None where the drafter has none.
    """

    method: DraftMethod
    settings: SpeculativeConfig
    checkpoint: Checkpoint | None = None
    model: ModelSpec | None = None

    def scratch_bytes(self, config: EngineConfig, model: ModelSpec, kv_dtype: Dtype) -> int:
        """Memory on a GPU for drafts whose blocks their sequences do not have yet: one block each.

        They are in the cache that the drafter writes to, after its other blocks.
        """
        if not self.method.needs_scratch_blocks:
            return 0
        layout = (self.model or model).kv_layout(kv_dtype)
        return config.max_num_seqs * layout.block_bytes(config.block_size)

    def block_bytes(self, config: EngineConfig, kv_dtype: Dtype) -> int:
        """Memory of its own for each KV block of the model."""
        if self.model is None:
            return 0
        return self.model.kv_layout(kv_dtype).block_bytes(config.block_size)


def _read_nothing(spec: DrafterSpec, checkpoint: Checkpoint, model: ModelSpec) -> DrafterSpec:
    return spec


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A method of drafting: what it needs, and how it is loaded.

    Attributes:
        load: the drafter on the CPU. Raises ConfigError: its weights are damaged or do not fit its
            settings.
        load_on_device: the drafter on a GPU. Raises ConfigError: the same, or no kernel supports
            them.
        read: a spec with what its checkpoint says, given one with the path of the checkpoint, and
            the checkpoint and the shape of the model that is drafted for. Raises ConfigError: it is
            damaged, or for another model.
        requires_model: it has weights of its own: the setting `model`.
        requires_num_layers: it is the first layers of its target: the setting `num_layers`.
        needs_history: on a GPU it reads the tokens of its sequences.
        needs_scratch_blocks: on a GPU it writes keys and values where sequences may have no block.
        shares_target_kv: these keys and values are in its target's cache.
        load_on_host: beside a GPU, the drafter of those sequences whose tokens the host must know
            before the next step; None if they cannot have drafts.
    """

    load: Callable[[DrafterSpec, Target], Drafter]
    load_on_device: Callable[[DrafterSpec, DeviceTarget], DeviceDrafter]
    read: Callable[[DrafterSpec, Checkpoint, ModelSpec], DrafterSpec] = _read_nothing
    requires_model: bool = False
    requires_num_layers: bool = False
    needs_history: bool = False
    needs_scratch_blocks: bool = False
    shares_target_kv: bool = False
    load_on_host: Callable[[DrafterSpec], Drafter] | None = None
