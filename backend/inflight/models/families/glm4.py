"""GLM-4 0414 (arXiv:2406.12793): norms before and after sublayers, RoPE of half of each head."""

from __future__ import annotations

from inflight.models.family import TENSORS, Family, Settings, Slot
from inflight.models.spec import LayerSpec

_GATE_UP: Slot = ("mlp.gate_up_proj", "ffn_up")


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(qkv_bias=settings.has_bias("attention_bias", "q"))
    return [LayerSpec(attention, settings.mlp(), post_norms=True)] * settings.num_layers


FAMILY = Family(
    name="glm4",
    layers=layers,
    model_types=("glm4",),
    gguf_architectures=("glm4",),
    defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128},
    tensors={
        **TENSORS,
        "attention_post_norm": ("post_self_attn_layernorm", "post_attention_norm"),
        "gate": _GATE_UP,
        "up": _GATE_UP,
        "mlp_post_norm": ("post_mlp_layernorm", "post_ffw_norm"),
    },
    rope_pairs=("huggingface", "gguf"),
)
