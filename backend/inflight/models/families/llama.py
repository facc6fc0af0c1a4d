"""Llama (arXiv:2302.13971, grouped-query attention as in Llama 2)."""

from __future__ import annotations

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(
        qkv_bias=bias,
        out_bias=bias,
        # Mistral's GGUF files have architecture llama, and may have a window.
        window=settings.window() if settings.format == "gguf" else 0,
    )
    mlp = settings.mlp(bias=settings.has_bias("mlp_bias", "gate"))
    return [LayerSpec(attention, mlp)] * settings.num_layers


FAMILY = Family(
    name="llama",
    layers=layers,
    model_types=("llama",),
    gguf_architectures=("llama",),
    rope_pairs=("gguf",),
)
