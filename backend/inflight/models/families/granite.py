"""Granite 3 and 4 dense (arXiv:2505.08699): Llama with scales of embeddings, residual stream,
attention and logits.
"""

from __future__ import annotations

from typing import Any

from inflight.models.family import Family, Settings
from inflight.models.spec import AttentionSpec, LayerSpec


def attention(settings: Settings) -> AttentionSpec:
    bias = settings.has_bias("attention_bias", "q")
    return settings.attention(
        qkv_bias=bias, out_bias=bias, softmax_scale=settings.number("attention_multiplier", 1.0)
    )


def layers(settings: Settings) -> list[LayerSpec]:
    mlp = settings.mlp(bias=settings.has_bias("mlp_bias", "gate"))
    scale = settings.number("residual_multiplier", 1.0)
    return [LayerSpec(attention(settings), mlp, residual_scale=scale)] * settings.num_layers


def model(settings: Settings) -> dict[str, Any]:
    return {
        "embedding_scale": settings.number("embedding_multiplier", 1.0),
        # Both formats state the divisor.
        "logit_scale": 1.0 / settings.number("logits_scaling", 1.0),
    }


FAMILY = Family(
    name="granite",
    layers=layers,
    model=model,
    model_types=("granite",),
    gguf_architectures=("granite",),
    rope_pairs=("gguf",),
)
