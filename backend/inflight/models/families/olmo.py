"""OLMo 2 (arXiv:2501.00656) and 3 (arXiv:2512.13961): norms of the sublayers' outputs alone, a norm
of all heads of q and k at once; in OLMo 3 a sliding window in three of four layers.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.models.family import SANDWICH, Family, Settings
from inflight.models.spec import LayerSpec, RopeSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    full = settings.attention(qk_norm="full", qkv_bias=bias, out_bias=bias)
    # Scaling for long contexts is for full attention only.
    rope = RopeSpec(settings.sliding_rope.theta)
    window = settings.window()
    sliding = replace(full, window=window, rope=rope) if window else full
    mlp = settings.mlp()
    return [
        LayerSpec(sliding if is_sliding else full, mlp, pre_norms=False, post_norms=True)
        for is_sliding in settings.layer_types(lambda index: bool(window) and (index + 1) % 4 != 0)
    ]


FAMILY = Family(
    name="olmo",
    layers=layers,
    model_types=("olmo2", "olmo3"),
    gguf_architectures=("olmo2",),
    tensors=SANDWICH,
)
