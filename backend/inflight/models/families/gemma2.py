"""Gemma 2 (arXiv:2408.00118): norms before and after each sublayer, capped scores and logits, and a
sliding window in every other layer.
"""

from __future__ import annotations

from typing import Any

from inflight.models.families import gemma
from inflight.models.family import SANDWICH, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    full = settings.attention(
        qkv_bias=bias,
        out_bias=bias,
        softmax_scale=softmax_scale(settings, (46,)),
        score_cap=settings.cap("attn_logit_softcapping", 50.0),
    )
    sliding = settings.sliding(full, settings.window(default=4096))
    mlp = settings.mlp("gelu_tanh")
    return [
        LayerSpec(sliding if is_sliding else full, mlp, post_norms=True)
        for is_sliding in settings.layer_types(lambda index: index % 2 == 0)
    ]


def softmax_scale(settings: Settings, num_layers_of_27b: tuple[int, ...]) -> float:
    """GGUF files have no key for it; only the 27B models do not scale by their head_dim."""
    if settings.format == "huggingface":
        return float(settings.number("query_pre_attn_scalar", 256.0) ** -0.5)
    num_heads = settings.count("num_attention_heads")
    width = settings.count("hidden_size") // num_heads
    if settings.num_layers not in num_layers_of_27b:
        width = settings.count("head_dim", width)
    return float(width**-0.5)


def model(settings: Settings) -> dict[str, Any]:
    return {**gemma.model(settings), "logit_cap": settings.cap("final_logit_softcapping", 30.0)}


FAMILY = Family(
    name="gemma2",
    layers=layers,
    model=model,
    model_types=("gemma2",),
    gguf_architectures=("gemma2",),
    defaults={"tie_word_embeddings": True, "head_dim": 256},
    tensors=SANDWICH,
    zero_centered_norms=("huggingface",),
)
