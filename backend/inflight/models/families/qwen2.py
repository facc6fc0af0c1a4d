"""Qwen 2 and 2.5 (arXiv:2407.10671): q, k and v always have a bias, without a setting, and the
upper layers may have a sliding window.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.models.family import Family, Settings
from inflight.models.spec import AttentionSpec, LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    return windowed_layers(settings, settings.attention(qkv_bias=True))


def windowed_layers(settings: Settings, attention: AttentionSpec) -> list[LayerSpec]:
    """With use_sliding_window, layers from max_window_layers on have a sliding window."""
    window = settings.window(default=4096) if settings.fields.flag("use_sliding_window") else 0
    first = settings.fields.get("max_window_layers", 28)
    mlp = settings.mlp()
    return [
        LayerSpec(replace(attention, window=window if is_sliding else 0), mlp)
        for is_sliding in settings.layer_types(lambda index: bool(window) and index >= first)
    ]


FAMILY = Family(name="qwen2", layers=layers, model_types=("qwen2",), gguf_architectures=("qwen2",))
