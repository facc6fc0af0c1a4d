"""What GPUs do not support of what a `ModelSpec` can describe."""

from __future__ import annotations

from inflight.config import GPU_HEAD_DIMS
from inflight.models.spec import LayerSpec, ModelSpec

_REFUSES_UNTESTED = True
"""Whether layers are refused whose kernels have not been run on a GPU yet; their tests do not."""


def gpu_obstacle(spec: ModelSpec, max_len: int | None = None) -> str | None:
    """Why a model cannot run on a GPU; None if it can.

    Args:
        spec: of the model.
        max_len: maximum sequence length; None for the model's.
    """
    limit = spec.max_position_embeddings if max_len is None else max_len
    layers = list(dict.fromkeys(spec.layers))
    obstacles = [obstacle for layer in layers for obstacle in _without_kernel(layer, limit)]
    if _REFUSES_UNTESTED:
        obstacles += _untested_in_model(spec)
        obstacles += [obstacle for layer in layers for obstacle in _untested(layer)]
    found = next((what for is_there, what in obstacles if is_there), None)
    return None if found is None else f"{found} not supported on GPUs"


def _without_kernel(layer: LayerSpec, max_len: int) -> list[tuple[bool, str]]:
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
        (attention.norm_after_rope, "a norm of q and k after RoPE is"),
    ]


def _untested_in_model(spec: ModelSpec) -> list[tuple[bool, str]]:
    return [
        (spec.norm != "rms", "LayerNorm is"),
        (spec.embedding_scale != 1.0, "a scale of the embeddings is"),
        (spec.logit_scale != 1.0, "a scale of the logits is"),
        (spec.logit_cap != 0.0, "a cap of the logits is"),
    ]


def _untested(layer: LayerSpec) -> list[tuple[bool, str]]:
    return [
        (layer.attention.qk_norm == "full", "a norm of all heads of q and k at once is"),
        (layer.attention.score_cap != 0.0, "a cap of attention scores is"),
        (layer.post_norms, "a norm of the sublayers' outputs is"),
        (not layer.pre_norms, "a layer without norms of its inputs is"),
        (layer.parallel, "attention in parallel with the MLP is"),
        (layer.residual_scale != 1.0, "a scale of the residual stream is"),
        (not layer.mlp.gated, "an MLP without a gate is"),
        (layer.mlp.activation != "silu", f"the activation {layer.mlp.activation} is"),
    ]
