"""GLM-4.5 and 4.6 (arXiv:2508.06471): DeepSeek V3's routing, and RoPE of half of each head."""

from __future__ import annotations

from inflight.models.families import deepseek_v2, deepseek_v3
from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(
        qkv_bias=settings.has_bias("attention_bias", "q"),
        qk_norm="head" if settings.has_tensor("use_qk_norm", "q_norm") else None,
    )
    return deepseek_v2.layers_with_experts(
        settings,
        attention,
        settings.renormalizes(in_gguf=True),
        **deepseek_v3.routing(settings),
    )


FAMILY = Family(
    name="glm4_moe",
    layers=layers,
    model_types=("glm4_moe",),
    gguf_architectures=("glm4moe",),
    defaults={"partial_rotary_factor": 0.5, "norm_topk_prob": True},
    tensors={
        **deepseek_v3.EXPERT_TENSORS,
        "mlp_norm": ("post_attention_layernorm", "post_attention_norm"),
    },
    has_nextn=True,
)
