"""Mistral (arXiv:2310.06825): Llama; sliding windows are not supported yet."""

from __future__ import annotations

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    if window := settings.window(default=4096):
        raise settings.fields.error(
            f"sliding_window: attention within {window} tokens is not supported; allowed: null"
        )
    return [LayerSpec(settings.attention(), settings.mlp())] * settings.num_layers


FAMILY = Family(name="mistral", layers=layers, model_types=("mistral",))
