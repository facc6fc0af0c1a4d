"""OLMoE (arXiv:2409.02060): norms of all heads of q and k at once, and experts."""

from __future__ import annotations

from inflight.models.family import EXPERTS, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(qk_norm="full", qkv_bias=bias, out_bias=bias)
    moe = settings.moe(settings.mlp(), settings.renormalizes(in_gguf=False))
    return [LayerSpec(attention, moe)] * settings.num_layers


FAMILY = Family(
    name="olmoe",
    layers=layers,
    model_types=("olmoe",),
    gguf_architectures=("olmoe",),
    tensors=EXPERTS,
)
