"""Hunyuan dense: Llama with norms of q and k after RoPE."""

from __future__ import annotations

from inflight.models.family import TENSORS, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(
        qk_norm="head", norm_after_rope=True, qkv_bias=bias, out_bias=bias
    )
    return [LayerSpec(attention, settings.mlp())] * settings.num_layers


FAMILY = Family(
    name="hunyuan",
    layers=layers,
    model_types=("hunyuan_v1_dense",),
    gguf_architectures=("hunyuan-dense",),
    tensors={
        **TENSORS,
        "q_norm": ("self_attn.query_layernorm", "attn_q_norm"),
        "k_norm": ("self_attn.key_layernorm", "attn_k_norm"),
    },
)
