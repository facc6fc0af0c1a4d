"""DeepSeek V2's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import DeepseekV2Config

import family

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": family.ABSENT,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


class TestDeepseekV2(family.Suite):
    config = DeepseekV2Config
    variants: ClassVar = {
        "default": LATENT | EXPERTS,
        "lite": LATENT | EXPERTS | {"q_lora_rank": None, "rope_parameters": YARN},
        "groups": LATENT
        | EXPERTS
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    }
    architecture = "deepseek2"
    on_gpu = False

    def metadata(self, config: Any) -> dict[str, Any]:
        return metadata(config)


def metadata(config: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": rope_dim,
        "vocab_size": config.vocab_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_gating_func": 1,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return found
