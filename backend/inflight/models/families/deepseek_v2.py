"""DeepSeek V2 (arXiv:2405.04434): latent attention, and many small experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.models.family import EXPERTS, Family, Settings, Slot
from inflight.models.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec

EXPERT_TENSORS: Mapping[str, Slot] = {
    **EXPERTS,
    "shared_gate": ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    "shared_up": ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    "shared_down": ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
}

TENSORS: Mapping[str, Slot] = {
    **EXPERT_TENSORS,
    "q_a": ("self_attn.q_a_proj", "attn_q_a"),
    "q_a_norm": ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    "q_b": ("self_attn.q_b_proj", "attn_q_b"),
    "kv_a": ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    "kv_a_norm": ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    "kv_b": ("self_attn.kv_b_proj", "attn_kv_b"),
    # What kv_b consists of, as GGUF files have it (see `stored.up_projections`).
    "k_b": ("self_attn.k_b_proj", "attn_k_b"),
    "v_b": ("self_attn.v_b_proj", "attn_v_b"),
}

IGNORED_KEYS = frozenset(
    # Of training, of the cached key, and what follows from other settings.
    {"aux_loss_alpha", "ep_size", "seq_aux", "num_key_value_heads", "attention.head_count_kv"}
    | {"qk_head_dim"}
)

_SOFTMAX = 1  # of llama.cpp's gating functions


def latent_attention(settings: Settings) -> AttentionSpec:
    """The latent attention that the settings describe."""
    num_heads, rope_dim = settings.count("num_attention_heads"), settings.count("qk_rope_head_dim")
    nope_dim, v_dim = _head_dims(settings, rope_dim)
    latent = LatentSpec(
        q_rank=settings.count_or_zero("q_lora_rank"),
        rank=settings.count("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
    )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.key_dim,
        rope=replace(settings.rope, rotary_dim=0),
        softmax_scale=float(latent.qk_dim**-0.5) * _mscale(settings) ** 2,
        latent=latent,
    )


def _head_dims(settings: Settings, rope_dim: int) -> tuple[int, int]:
    """Columns of a head's query without RoPE, and of its value."""
    fields = settings.fields
    if settings.format == "huggingface":
        return fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    # Older files have the lengths of expanded keys and values under the other names.
    is_absorbed = "attention.key_length_mla" in fields
    suffix = "_mla" if is_absorbed else ""
    qk_dim = fields.count(f"attention.key_length{suffix}")
    if qk_dim <= rope_dim:
        raise fields.error(
            f"attention.key_length{suffix}: {qk_dim}; allowed: more than the {rope_dim} columns "
            "that RoPE rotates"
        )
    return qk_dim - rope_dim, fields.count(f"attention.value_length{suffix}")


def _mscale(settings: Settings) -> float:
    """The factor of queries and keys with YaRN, of which scores have the square."""
    rope = settings.rope
    if rope.type != "yarn" or rope.factor <= 1.0:
        return 1.0
    weight = 0.1 * rope.mscale_all_dim
    if settings.format == "gguf":
        weight = settings.fields.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0)
    return weight * math.log(rope.factor) + 1.0


def layers_with_experts(
    settings: Settings, attention: AttentionSpec, renormalize: bool, **routing: Any
) -> list[LayerSpec]:
    """Layers of which all but the first few, or those that are listed, have experts, with one of
    all tokens.

    Args:
        settings: of the checkpoint.
        attention: of all layers.
        renormalize: see `MoeSpec`.
        routing: further arguments of `MoeSpec`.
    """
    expert = settings.mlp(width="moe_intermediate_size")
    num_shared = settings.count_or_zero("n_shared_experts")
    moe = settings.moe(
        expert,
        renormalize,
        routing_scale=settings.number("routed_scaling_factor", 1.0),
        shared=MlpSpec(num_shared * expert.width) if num_shared else None,
        **routing,
    )
    mlp, num_dense = settings.mlp(), settings.count_or_zero("first_k_dense_replace")
    are_sparse = settings.listed("mlp_layer_types", "dense", "sparse") or [
        index >= num_dense for index in range(settings.num_layers)
    ]
    return [LayerSpec(attention, moe if is_sparse else mlp) for is_sparse in are_sparse]


def check_value(settings: Settings, key: str, *allowed: Any) -> None:
    """Refuse other values of a setting, whose default is the first one.

    Raises:
        ConfigError: it has another value.
    """
    value = settings.fields.get(key, allowed[0])
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise settings.fields.error(f"{key}: {value!r}; allowed: {names}")


def layers(settings: Settings) -> list[LayerSpec]:
    check_value(settings, "scoring_func", "softmax")
    check_value(settings, "expert_gating_func", _SOFTMAX, "softmax")
    check_value(settings, "topk_method", "greedy", "group_limited_greedy")
    check_value(settings, settings.key("norm_topk_prob"), False)
    num_groups, top_groups = settings.count("n_group", 1), settings.count("topk_group", 1)
    # GGUF files do not name the method.
    if (
        settings.format == "huggingface"
        and settings.fields.get("topk_method", "greedy") == "greedy"
    ):
        num_groups = top_groups = 1
    return layers_with_experts(
        settings,
        latent_attention(settings),
        renormalize=False,
        num_groups=num_groups,
        top_groups=top_groups,
        best_of_group=1,
    )


FAMILY = Family(
    name="deepseek_v2",
    layers=layers,
    model_types=("deepseek_v2",),
    gguf_architectures=("deepseek2",),
    defaults={"q_lora_rank": 1536},
    tensors=TENSORS,
    rope_pairs=("huggingface", "gguf"),
    ignored_keys=IGNORED_KEYS,
)
