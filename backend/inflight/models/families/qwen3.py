"""Qwen 3 (arXiv:2505.09388): each head of q and k has a norm before RoPE; no biases."""

from __future__ import annotations

from inflight.models.families.qwen2 import windowed_layers
from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(qk_norm="head", qkv_bias=bias, out_bias=bias)
    return windowed_layers(settings, attention)


FAMILY = Family(name="qwen3", layers=layers, model_types=("qwen3",), gguf_architectures=("qwen3",))
