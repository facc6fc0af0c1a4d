"""StarCoder2 (arXiv:2402.19173): LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from inflight.models.family import TENSORS, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("use_bias", "q")
    attention = settings.attention(qkv_bias=bias, out_bias=bias, window=settings.window())
    mlp = settings.mlp("gelu_tanh", gated=False, bias=bias)
    return [LayerSpec(attention, mlp)] * settings.num_layers


def model(settings: Settings) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True}


FAMILY = Family(
    name="starcoder2",
    layers=layers,
    model=model,
    model_types=("starcoder2",),
    gguf_architectures=("starcoder2",),
    norm_eps="norm_epsilon",
    defaults={"tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True},
    tensors={**TENSORS, "up": ("mlp.c_fc", "ffn_up"), "down": ("mlp.c_proj", "ffn_down")},
)
