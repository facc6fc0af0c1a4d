"""Small models with latent attention: their settings and tensors, as of transformers, and as of
llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHAPE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,  # of RoPE, as transformers writes it
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GPU_SHAPE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 64,  # of RoPE, as transformers writes it
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
}
"""Of those that GPUs support, with experts."""

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

HeadDims = tuple[int, int]
"""Columns of a head's key without RoPE, and of its value."""

_BOTH = "self_attn.kv_b_proj.weight"


def head_dims(settings: dict[str, Any]) -> HeadDims | None:
    """Of a model's settings; None without latent attention."""
    if "kv_lora_rank" not in settings:
        return None
    return settings["qk_nope_head_dim"], settings["v_head_dim"]


def is_joined(name: str) -> bool:
    """Whether a tensor makes keys and values of latents."""
    return name.endswith(_BOTH)


def split(joined: Tensor, dims: HeadDims) -> tuple[Tensor, Tensor]:
    """k_b [H, rank, N] and v_b [H, V, rank] of kv_b [H * (N + V), rank]."""
    heads = joined.view(-1, sum(dims), joined.shape[1])
    keys, values = torch.split(heads, dims, 1)
    return keys.mT.contiguous(), values.contiguous()


def each_part(joined: Tensor, dims: HeadDims, change: Callable[[Tensor], Tensor]) -> Tensor:
    """kv_b after a change of k_b and v_b."""
    keys, values = map(change, split(joined, dims))
    return torch.cat([keys.mT, values], 1).flatten(0, 1)


def named(weights: dict[str, Tensor], dims: HeadDims) -> dict[str, Tensor]:
    """The same weights with k_b and v_b in place of kv_b."""
    found = {}
    for name, tensor in weights.items():
        if not is_joined(name):
            found[name] = tensor
            continue
        layer = name.removesuffix(_BOTH)
        keys, values = split(tensor, dims)
        found[f"{layer}self_attn.k_b_proj.weight"] = keys
        found[f"{layer}self_attn.v_b_proj.weight"] = values
    return found


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
