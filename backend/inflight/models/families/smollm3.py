"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec, RopeSpec


def layers(settings: Settings) -> list[LayerSpec]:
    bias = settings.has_bias("attention_bias", "q")
    rotated = settings.attention(qkv_bias=bias, out_bias=bias)
    # A window is only for the layers without RoPE, unless layer_types says otherwise.
    window = settings.window() if settings.fields.flag("use_sliding_window") else 0
    mlp = settings.mlp(bias=settings.has_bias("mlp_bias", "gate"))
    has_rope = _has_rope(settings)
    is_sliding = settings.layer_types(lambda index: bool(window) and not has_rope[index])
    return [
        LayerSpec(
            replace(
                rotated,
                rope=rotated.rope if has_rope[index] else RopeSpec(type="none"),
                window=window if is_sliding[index] else 0,
            ),
            mlp,
        )
        for index in range(settings.num_layers)
    ]


def _has_rope(settings: Settings) -> list[bool]:
    listed = settings.fields.get("no_rope_layers")
    if listed is None:
        interval = settings.fields.count("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(settings.num_layers)]
    whole = isinstance(listed, list) and len(listed) == settings.num_layers
    if not whole or not all(flag in (0, 1) for flag in listed):
        raise settings.fields.error(
            f"no_rope_layers: {listed!r}; allowed: 0 or 1 for each of {settings.num_layers} layers"
        )
    return [bool(flag) for flag in listed]


FAMILY = Family(
    name="smollm3",
    layers=layers,
    model_types=("smollm3",),
    gguf_architectures=("smollm3",),
    defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    rope_pairs=("gguf",),
)
