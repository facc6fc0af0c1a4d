"""GLM-4.5 and 4.6 (arXiv:2508.06471): DeepSeek V3's routing, and RoPE of half of each head."""

from __future__ import annotations

from inflight.models.family import EXPERTS, Family, Settings
from inflight.models.spec import LayerSpec, MlpSpec

_SIGMOID = 2  # of llama.cpp's gating functions


def layers(settings: Settings) -> list[LayerSpec]:
    gating = settings.fields.get("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise settings.fields.error(f"expert_gating_func: {gating!r}; allowed: {_SIGMOID}, sigmoid")
    attention = settings.attention(
        qkv_bias=settings.has_bias("attention_bias", "q"),
        qk_norm="head" if settings.has_tensor("use_qk_norm", "q_norm") else None,
    )
    expert = settings.mlp(width="moe_intermediate_size")
    num_shared = settings.count("n_shared_experts")
    moe = settings.moe(
        expert,
        settings.renormalizes(in_gguf=True),
        score="sigmoid",
        select_bias=True,
        num_groups=settings.count("n_group", 1),
        top_groups=settings.count("topk_group", 1),
        routing_scale=settings.number("routed_scaling_factor", 1.0),
        shared=MlpSpec(num_shared * expert.width),
    )
    mlp, num_dense = settings.mlp(), settings.count_or_zero("first_k_dense_replace")
    return [
        LayerSpec(attention, mlp if index < num_dense else moe)
        for index in range(settings.num_layers)
    ]


FAMILY = Family(
    name="glm4_moe",
    layers=layers,
    model_types=("glm4_moe",),
    gguf_architectures=("glm4moe",),
    defaults={"partial_rotary_factor": 0.5, "norm_topk_prob": True},
    tensors={
        **EXPERTS,
        "mlp_norm": ("post_attention_layernorm", "post_attention_norm"),
        "select_bias": ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        "shared_gate": ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        "shared_up": ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        "shared_down": ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    },
    has_nextn=True,
)
