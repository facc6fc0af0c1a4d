"""EXAONE 4 (arXiv:2507.11407): norms of the sublayers' outputs alone, norms of q and k; the larger
ones have a sliding window and RoPE in three of four layers, and neither in the fourth.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.models.family import SANDWICH, Family, Settings
from inflight.models.spec import LayerSpec, RopeSpec


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(qk_norm="head")
    full, sliding = attention, attention
    if _has_window(settings):
        full = replace(attention, rope=RopeSpec(type="none"))
        sliding = replace(attention, window=settings.window())
    mlp = settings.mlp()
    return [
        LayerSpec(sliding if is_sliding else full, mlp, pre_norms=False, post_norms=True)
        for is_sliding in settings.layer_types(lambda index: _is_sliding(settings, index))
    ]


def _has_window(settings: Settings) -> bool:
    return bool(settings.fields.get(settings.key("sliding_window")))


def _is_sliding(settings: Settings, index: int) -> bool:
    pattern = settings.fields.get("sliding_window_pattern", 4)
    if not _has_window(settings) or not pattern:
        return False
    if isinstance(pattern, str):  # such as LLLG, local and global
        return pattern[index % len(pattern)] == "L"
    return (index + 1) % settings.fields.count("sliding_window_pattern", 4) != 0


FAMILY = Family(
    name="exaone4",
    layers=layers,
    model_types=("exaone4",),
    gguf_architectures=("exaone4",),
    tensors=SANDWICH,
)
