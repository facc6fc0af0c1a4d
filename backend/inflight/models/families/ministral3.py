"""Ministral 3 (arXiv:2601.08584): Llama with YaRN; queries grow beyond the trained context."""

from __future__ import annotations

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec, QueryScaling


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(window=settings.window(), query_scaling=_scaling(settings))
    return [LayerSpec(attention, settings.mlp())] * settings.num_layers


def _scaling(settings: Settings) -> QueryScaling | None:
    length = settings.rope.original_max_position
    if settings.format == "gguf":
        beta = settings.fields.get("attention.temperature_scale")
        length = settings.fields.count("attention.temperature_length", length)
    else:
        rope = settings.fields.get("rope_parameters") or settings.fields.get("rope_scaling") or {}
        beta = rope.get("llama_4_scaling_beta")
    return QueryScaling(float(beta), length) if beta else None


FAMILY = Family(
    name="ministral3",
    layers=layers,
    model_types=("ministral3",),
    gguf_architectures=("mistral3",),
    defaults={"head_dim": 128},
    rope_pairs=("gguf",),
)
