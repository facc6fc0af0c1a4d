"""ERNIE 4.5 dense: Llama with RoPE of adjacent columns in both formats."""

from __future__ import annotations

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("use_bias", "q")
    attention = settings.attention(qkv_bias=bias, out_bias=bias)
    return [LayerSpec(attention, settings.mlp(bias=bias))] * settings.num_layers


FAMILY = Family(
    name="ernie4_5",
    layers=layers,
    model_types=("ernie4_5",),
    gguf_architectures=("ernie4_5",),
    defaults={"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 5e5},
    rope_pairs=("huggingface", "gguf"),
)
