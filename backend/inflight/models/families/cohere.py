"""Command R (Cohere): attention and MLP in parallel on one LayerNorm, without bias."""

from __future__ import annotations

from typing import Any

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    has_norm = settings.has_tensor("use_qk_norm", "q_norm")
    attention = settings.attention(
        qkv_bias=bias, out_bias=bias, qk_norm="heads" if has_norm else None
    )
    return [LayerSpec(attention, settings.mlp(), parallel=True)] * settings.num_layers


def model(settings: Settings) -> dict[str, Any]:
    return {"norm": "layer", "logit_scale": settings.number("logit_scale", 0.0625)}


FAMILY = Family(
    name="cohere",
    layers=layers,
    model=model,
    model_types=("cohere",),
    gguf_architectures=("command-r",),
    norm_eps="layer_norm_eps",
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 5e5},
    rope_pairs=("huggingface", "gguf"),
)
