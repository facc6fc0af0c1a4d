"""Gemma (arXiv:2403.08295): Llama with scaled embeddings, GELU, and norms stored minus one."""

from __future__ import annotations

from typing import Any

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(qkv_bias=bias, out_bias=bias)
    # Old files say gelu and mean its approximation.
    activation = settings.mlp("gelu_tanh", aliases=("gelu",))
    return [LayerSpec(attention, activation)] * settings.num_layers


def model(settings: Settings) -> dict[str, Any]:
    return {"embedding_scale": settings.count("hidden_size") ** 0.5}


FAMILY = Family(
    name="gemma",
    layers=layers,
    model=model,
    model_types=("gemma",),
    gguf_architectures=("gemma",),
    defaults={"tie_word_embeddings": True, "head_dim": 256},
    zero_centered_norms=("huggingface",),
)
