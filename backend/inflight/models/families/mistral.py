"""Mistral (arXiv:2310.06825): Llama, optionally with a sliding window in all layers."""

from __future__ import annotations

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(window=settings.window(default=4096))
    return [LayerSpec(attention, settings.mlp())] * settings.num_layers


# llama.cpp converts Mistral to Llama, whose family reads the window as well.
FAMILY = Family(
    name="mistral",
    layers=layers,
    model_types=("mistral",),
    gguf_architectures=("mistral",),
    rope_pairs=("gguf",),
)
