"""What GPUs do not support of what a `ModelSpec` can describe."""

from __future__ import annotations

from inflight.config import GPU_HEAD_DIMS
from inflight.models.spec import LatentSpec, LayerSpec, ModelSpec, MoeSpec


def gpu_obstacle(spec: ModelSpec, max_len: int | None = None, is_hopper: bool = True) -> str | None:
    """Why a model cannot run on a GPU; None if it can.

    Args:
        spec: of the model.
        max_len: maximum sequence length; None for the model's.
        is_hopper: whether the GPU is one, as some models require.
    """
    if not is_hopper and any(map(has_experts, spec.layers)):
        return "a mixture of experts is supported on Hopper GPUs only"
    if spec.hidden_size % _EXPERT_WIDTHS and any(map(has_experts, spec.layers)):
        return (
            f"experts of a hidden size of {spec.hidden_size} (allowed: multiples of "
            f"{_EXPERT_WIDTHS}) are not supported on GPUs"
        )
    limit = spec.max_position_embeddings if max_len is None else max_len
    obstacles = [
        obstacle for layer in dict.fromkeys(spec.layers) for obstacle in _obstacles(layer, limit)
    ]
    found = next((what for is_there, what in obstacles if is_there), None)
    return None if found is None else f"{found} not supported on GPUs"


def _obstacles(layer: LayerSpec, max_len: int) -> list[tuple[bool, str]]:
    attention = layer.attention
    scaling, head_dims = attention.query_scaling, ", ".join(map(str, GPU_HEAD_DIMS))
    return [
        *(() if attention.latent is None else _latent_obstacles(attention.latent)),
        (
            attention.latent is None and attention.head_dim not in GPU_HEAD_DIMS,
            f"head_dim {attention.head_dim} (allowed: {head_dims}) is",
        ),
        (
            scaling is not None and max_len > scaling.length,
            f"max_model_len above {scaling and scaling.length} with this model's scaling of "
            "queries is",
        ),
        (attention.qk_norm == "heads", "a norm of q and k with weights for each head is"),
        *(_moe_obstacles(layer.mlp) if isinstance(layer.mlp, MoeSpec) else ()),
        (attention.norm_after_rope, "a norm of q and k after RoPE is"),
    ]


LATENT_DIMS = (512, 64)
LATENT_NOPE_DIMS = (128, 192)
LATENT_VALUE_DIMS = 64
"""Columns of latents and of what is rotated, those of heads that are not rotated, and a divisor of
those of values, as the kernels have them."""


def _latent_obstacles(latent: LatentSpec) -> list[tuple[bool, str]]:
    sizes = (latent.rank, latent.rope_dim)
    return [
        (
            sizes != LATENT_DIMS,
            f"latent attention with {sizes[0]} + {sizes[1]} columns (allowed: {LATENT_DIMS[0]} + "
            f"{LATENT_DIMS[1]}) is",
        ),
        (
            latent.nope_dim not in LATENT_NOPE_DIMS,
            f"latent attention with {latent.nope_dim} columns of a head without RoPE (allowed: "
            f"{', '.join(map(str, LATENT_NOPE_DIMS))}) is",
        ),
        (
            latent.v_dim % LATENT_VALUE_DIMS != 0,
            f"latent attention with values of {latent.v_dim} columns (allowed: multiples of "
            f"{LATENT_VALUE_DIMS}) is",
        ),
    ]


MAX_EXPERTS, MAX_TOP_K, MAX_EXPERT_GROUPS = 512, 31, 32
"""Of routing, as the kernels have them."""

_EXPERT_WIDTHS = 16
"""Products take multiples of it, 8 bits ones included."""


def _moe_obstacles(moe: MoeSpec) -> list[tuple[bool, str]]:
    shared, width = moe.shared, moe.expert.width
    return [
        (moe.num_experts > MAX_EXPERTS, f"more than {MAX_EXPERTS} experts are"),
        (moe.top_k > MAX_TOP_K, f"more than {MAX_TOP_K} experts per token are"),
        (
            moe.num_groups > MAX_EXPERT_GROUPS,
            f"more than {MAX_EXPERT_GROUPS} groups of experts are",
        ),
        (
            width % _EXPERT_WIDTHS != 0,
            f"a width of {width} of experts (allowed: multiples of {_EXPERT_WIDTHS}) is",
        ),
        (
            not moe.expert.gated or moe.expert.activation not in ("silu", "clamped_swiglu"),
            f"{moe.expert.activation} in experts is",
        ),
        (
            shared is not None and (shared.activation != "silu" or not shared.gated),
            "a shared expert with another gate than silu is",
        ),
    ]


def shared_experts(moe: MoeSpec) -> int:
    """Experts of which the shared one consists, if it can be kept as some of the others' width, and
    be multiplied with them; 0 if it cannot."""
    shared, expert = moe.shared, moe.expert
    if shared is None or shared.width % expert.width or shared.bias or expert.bias:
        return 0
    if (shared.activation, shared.gated) != (expert.activation, expert.gated):
        return 0
    count = shared.width // expert.width
    fits = moe.top_k + count <= MAX_TOP_K and moe.num_experts + count <= MAX_EXPERTS
    return count if fits else 0


def has_experts(layer: LayerSpec) -> bool:
    """Whether a layer's feed-forward part is a mixture of experts."""
    return isinstance(layer.mlp, MoeSpec)
