"""gpt-oss (arXiv:2508.10925): attention with sinks, windows in every second layer, and experts with
biases and a clamped gate.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.models.family import EXPERTS, Family, Settings, Slot
from inflight.models.spec import LayerSpec

# gate | up is one tensor in folders.
_GATE_UP = "mlp.experts.gate_up_proj.{}"
_TENSORS: dict[str, Slot] = {
    **EXPERTS,
    "sinks": ("self_attn.sinks", "attn_sinks.weight"),
    "mlp_norm": ("post_attention_layernorm", "post_attention_norm"),
    "router": ("mlp.router", "ffn_gate_inp"),
    "expert_gate": (_GATE_UP, "ffn_gate_exps"),
    "expert_up": (_GATE_UP, "ffn_up_exps"),
    "expert_down": ("mlp.experts.down_proj.{}", "ffn_down_exps"),
}
_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Of all published files, and of the activation `clamped_swiglu`."""


def layers(settings: Settings) -> list[LayerSpec]:
    for key, value in _GATE.items():
        if settings.fields.number(key, value) != value:
            raise settings.fields.error(f"{key}: {settings.fields.get(key)}; allowed: {value}")
    attention = settings.attention(
        qkv_bias=settings.has_bias("attention_bias", "q"),
        out_bias=settings.has_bias("attention_bias", "out"),
        sinks=True,
    )
    if settings.format == "gguf":
        # YaRN's bounds are not rounded, for which GGUF has no key.
        attention = replace(attention, rope=replace(attention.rope, truncate=False))
    window = settings.window(default=128)
    expert = settings.mlp("clamped_swiglu", aliases=("silu",), bias=True)
    moe = settings.moe(expert, renormalize=True, router_bias=True)
    return [
        LayerSpec(replace(attention, window=window if is_sliding else 0), moe)
        for is_sliding in settings.layer_types(lambda index: bool(window) and index % 2 == 0)
    ]


FAMILY = Family(
    name="gpt_oss",
    layers=layers,
    model_types=("gpt_oss",),
    gguf_architectures=("gpt-oss",),
    defaults={"attention_bias": True},
    tensors=_TENSORS,
    transposed_experts=("huggingface",),
    # The first are again those of the rotary embedding and of the experts, under other names. GGUF
    # files have the last for the dense layers, of which there are none.
    ignored_keys=frozenset(
        {"initial_context_length", "experts_per_token", "expert_feed_forward_length"}
    ),
)
