"""Command R7B and A (Cohere 2, arXiv:2504.00698): as Command R, with a sliding window and RoPE in
three of four layers, and neither in the fourth.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.models.families.cohere import model
from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec, RopeSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    attention = settings.attention(qkv_bias=bias, out_bias=bias)
    sliding = replace(attention, window=settings.window(default=4096))
    full = replace(attention, rope=RopeSpec(type="none"))
    pattern = settings.fields.count("sliding_window_pattern", 4)
    mlp = settings.mlp()
    return [
        LayerSpec(sliding if is_sliding else full, mlp, parallel=True)
        for is_sliding in settings.layer_types(lambda index: (index + 1) % pattern != 0)
    ]


FAMILY = Family(
    name="cohere2",
    layers=layers,
    model=model,
    model_types=("cohere2",),
    gguf_architectures=("cohere2",),
    norm_eps="layer_norm_eps",
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    rope_pairs=("huggingface", "gguf"),
)
