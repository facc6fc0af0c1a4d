"""Granite 3 with experts: Granite's scales, and optionally an expert that all tokens share."""

from __future__ import annotations

from inflight.models.families import granite
from inflight.models.family import EXPERTS, Family, Settings, Slot
from inflight.models.spec import LayerSpec

# gate | up is one tensor in folders.
_INPUT = "block_sparse_moe.input_linear.{}"
_SHARED_INPUT = "shared_mlp.input_linear"
_TENSORS: dict[str, Slot] = {
    **EXPERTS,
    "router": ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    "expert_gate": (_INPUT, "ffn_gate_exps"),
    "expert_up": (_INPUT, "ffn_up_exps"),
    "expert_down": ("block_sparse_moe.output_linear.{}", "ffn_down_exps"),
    "shared_gate": (_SHARED_INPUT, "ffn_gate_shexp"),
    "shared_up": (_SHARED_INPUT, "ffn_up_shexp"),
    "shared_down": ("shared_mlp.output_linear", "ffn_down_shexp"),
}


def layers(settings: Settings) -> list[LayerSpec]:
    has_shared = bool(settings.fields.get(settings.key("shared_intermediate_size")))
    shared = settings.mlp(width="shared_intermediate_size") if has_shared else None
    moe = settings.moe(settings.mlp(), renormalize=True, shared=shared)
    scale = settings.number("residual_multiplier", 1.0)
    attention = granite.attention(settings)
    return [LayerSpec(attention, moe, residual_scale=scale)] * settings.num_layers


FAMILY = Family(
    name="granite_moe",
    layers=layers,
    model=granite.model,
    model_types=("granitemoe", "granitemoeshared"),
    gguf_architectures=("granitemoe",),
    tensors=_TENSORS,
    rope_pairs=("gguf",),
)
