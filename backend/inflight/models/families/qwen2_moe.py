"""Qwen 1.5 and 2 with experts (arXiv:2407.10671): routed ones, and a gated one for all tokens."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.family import EXPERTS, Family, Settings
from inflight.models.spec import LayerSpec, MlpSpec, MoeSpec


def layers(settings: Settings) -> list[LayerSpec]:
    moe = settings.moe(
        settings.mlp(width="moe_intermediate_size"),
        settings.renormalizes(in_gguf=False),
        shared=settings.mlp(width="shared_expert_intermediate_size"),
        shared_gate=True,
    )
    attention = settings.attention(qkv_bias=settings.has_bias("qkv_bias", "q"))
    window = settings.window(default=4096) if settings.fields.flag("use_sliding_window") else 0
    end = settings.fields.get("max_window_layers", 28)
    # Unlike in Qwen 2: every second layer, and those below max_window_layers.
    slides = settings.layer_types(lambda index: bool(window) and index % 2 == 0 and index < end)
    return [
        LayerSpec(replace(attention, window=window if is_sliding else 0), mlp)
        for is_sliding, mlp in zip(slides, sparse_layers(settings, moe), strict=True)
    ]


def sparse_layers(settings: Settings, moe: MoeSpec) -> list[MlpSpec | MoeSpec]:
    """Layers in mlp_only_layers, and those between every decoder_sparse_step-th, are dense."""
    num_layers = settings.num_layers
    step = settings.fields.count("decoder_sparse_step", 1)
    dense = settings.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise settings.fields.error(f"mlp_only_layers: {dense!r}; allowed: a list of layers")
    is_sparse = [
        index not in dense and (index + 1) % step == 0 for index in range(settings.num_layers)
    ]
    if all(is_sparse):
        return [moe] * num_layers
    mlp = settings.mlp()
    return [moe if sparse else mlp for sparse in is_sparse]


FAMILY = Family(
    name="qwen2_moe",
    layers=layers,
    model_types=("qwen2_moe",),
    gguf_architectures=("qwen2moe",),
    defaults={"qkv_bias": True},
    tensors={
        **EXPERTS,
        "shared_gate": ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        "shared_up": ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        "shared_down": ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        "shared_score": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    },
    # The width of layers without experts, of which there may be none.
    ignored_keys=frozenset({"intermediate_size", "feed_forward_length"}),
)
