"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from inflight.models.family import TENSORS, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(
        qkv_bias=settings.has_bias("attention_bias", "q"),
        out_bias=settings.has_bias("attention_out_bias", "out"),
    )
    mlp = settings.mlp(bias=settings.has_bias("mlp_bias", "gate"))
    return [LayerSpec(attention, mlp)] * settings.num_layers


FAMILY = Family(
    name="seed_oss",
    layers=layers,
    model_types=("seed_oss",),
    gguf_architectures=("seed_oss",),
    defaults={"attention_bias": True, "head_dim": 128},
    tensors={**TENSORS, "mlp_norm": ("post_attention_layernorm", "post_attention_norm")},
)
