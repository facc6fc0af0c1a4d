"""Nemotron and Minitron (arXiv:2407.14679): LayerNorm stored minus one, squared ReLU without gate,
RoPE of half of each head.
"""

from __future__ import annotations

from inflight.models.families.starcoder2 import model
from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(qkv_bias=bias, out_bias=bias)
    mlp = settings.mlp("relu2", gated=False, bias=settings.has_bias("mlp_bias", "up"))
    return [LayerSpec(attention, mlp)] * settings.num_layers


FAMILY = Family(
    name="nemotron",
    layers=layers,
    model=model,
    model_types=("nemotron",),
    gguf_architectures=("nemotron",),
    norm_eps="norm_eps",
    defaults={"partial_rotary_factor": 0.5, "norm_eps": 1e-5},
    zero_centered_norms=("huggingface",),
)
