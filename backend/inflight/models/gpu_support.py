"""What GPUs do not support of what a `ModelSpec` can describe."""

from __future__ import annotations

from inflight.config import GPU_HEAD_DIMS
from inflight.models.spec import LayerSpec, ModelSpec, MoeSpec


def gpu_obstacle(spec: ModelSpec, max_len: int | None = None) -> str | None:
    """Why a model cannot run on a GPU; None if it can.

    Args:
        spec: of the model.
        max_len: maximum sequence length; None for the model's.
    """
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
        (
            attention.head_dim not in GPU_HEAD_DIMS,
            f"head_dim {attention.head_dim} (allowed: {head_dims}) is",
        ),
        (
            scaling is not None and max_len > scaling.length,
            f"max_model_len above {scaling and scaling.length} with this model's scaling of "
            "queries is",
        ),
        (attention.qk_norm == "heads", "a norm of q and k with weights for each head is"),
        (attention.sinks, "attention with sinks is"),
        (isinstance(layer.mlp, MoeSpec), "a mixture of experts is"),
        (attention.norm_after_rope, "a norm of q and k after RoPE is"),
    ]
