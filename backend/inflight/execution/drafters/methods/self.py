"""Drafts by the model's own first layers (self-speculation, arXiv:2309.08168).

They write to the target's KV cache: at a draft's position, the same values that the target writes
when it verifies the draft.
"""

from __future__ import annotations

from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Target
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.execution.drafters.methods.draft_model import DeviceModelPasses, ModelDrafter


def _load(spec: DrafterSpec, target: Target) -> ModelDrafter:
    return ModelDrafter(target.model, target.cache, spec.settings.num_layers)


def _load_on_device(spec: DrafterSpec, target: DeviceTarget) -> DeviceDrafter:
    from inflight.execution.drafters.device_passes import PassDrafter

    return PassDrafter(DeviceModelPasses(target, None, spec.settings.num_layers), target)


METHOD = DraftMethod(
    load=_load,
    load_on_device=_load_on_device,
    requires_num_layers=True,
    writes_kv=True,
    shares_target_kv=True,
)
