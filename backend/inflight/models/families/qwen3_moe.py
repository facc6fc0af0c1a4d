"""Qwen 3 with experts (arXiv:2505.09388): Qwen 3's attention, and no shared expert."""

from __future__ import annotations

from inflight.models.families.qwen2_moe import sparse_layers
from inflight.models.family import EXPERTS, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(qk_norm="head", qkv_bias=bias, out_bias=bias)
    expert = settings.mlp(width="moe_intermediate_size")
    moe = settings.moe(expert, settings.renormalizes(in_gguf=True))
    return [LayerSpec(attention, mlp) for mlp in sparse_layers(settings, moe)]


FAMILY = Family(
    name="qwen3_moe",
    layers=layers,
    model_types=("qwen3_moe",),
    gguf_architectures=("qwen3moe",),
    tensors=EXPERTS,
    # The width of layers without experts, of which there may be none.
    ignored_keys=frozenset({"intermediate_size", "feed_forward_length"}),
)
