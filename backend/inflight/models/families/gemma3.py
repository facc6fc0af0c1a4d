"""Gemma 3, text only (arXiv:2503.19786): as Gemma 2 without caps, with norms of q and k, and a
sliding window with its own RoPE in five of six layers.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.models.families.gemma import model
from inflight.models.families.gemma2 import softmax_scale
from inflight.models.family import SANDWICH, Family, Settings
from inflight.models.spec import LayerSpec, RopeSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    full = settings.attention(
        qk_norm="head", qkv_bias=bias, out_bias=bias, softmax_scale=softmax_scale(settings, (62,))
    )
    sliding = replace(
        full, window=settings.window(default=4096), rope=RopeSpec(_sliding_theta(settings))
    )
    pattern = settings.fields.count("sliding_window_pattern", 6)
    mlp = settings.mlp("gelu_tanh")
    return [
        LayerSpec(sliding if is_sliding else full, mlp, post_norms=True)
        for is_sliding in settings.layer_types(lambda index: (index + 1) % pattern != 0)
    ]


def _sliding_theta(settings: Settings) -> float:
    """Scaling for long contexts is for full attention only."""
    if settings.sliding_rope is not settings.rope:
        return settings.sliding_rope.theta
    return settings.fields.number("rope_local_base_freq", 10000.0)


FAMILY = Family(
    name="gemma3",
    layers=layers,
    model=model,
    model_types=("gemma3_text",),
    gguf_architectures=("gemma3",),
    defaults={"tie_word_embeddings": True, "head_dim": 256, "rope_theta": 1e6},
    tensors=SANDWICH,
    zero_centered_norms=("huggingface",),
)
