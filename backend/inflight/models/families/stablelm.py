"""StableLM 2 (arXiv:2402.17834): LayerNorm with bias, RoPE of a quarter of each head."""

from __future__ import annotations

from inflight.models.families.starcoder2 import model
from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    if settings.has_tensor("qk_layernorm", "q_norm"):
        raise settings.fields.error(
            "qk_layernorm: true is not supported; allowed: false, as in StableLM 2 1.6B and "
            "StableLM 3B"
        )
    attention = settings.attention(qkv_bias=settings.has_bias("use_qkv_bias", "q"))
    parallel = settings.fields.flag("use_parallel_residual")
    return [LayerSpec(attention, settings.mlp(), parallel=parallel)] * settings.num_layers


FAMILY = Family(
    name="stablelm",
    layers=layers,
    model=model,
    model_types=("stablelm",),
    gguf_architectures=("stablelm",),
    norm_eps="layer_norm_eps",
    defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
)
