"""Mixtures of experts in torch: routing, and the sum of experts.

Shapes: T tokens in the step, E experts, k experts per token, n columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by their softmax score (arXiv:1701.06538).

    Args:
        logits: [T, E] float32, of the router.
        top_k: k.
        renormalize: whether a token's weights sum to 1.

    Returns:
        Experts [T, k] int64, the highest score first and of equal ones the lower number; their
        weights [T, k] float32.
    """
    # topk leaves the order of equal scores open.
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def sum_of_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    run: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Run each expert once, with all of its tokens.

    A token's result does not depend on the other tokens if `run`'s does not: its experts' outputs
    are added in the order of its row.

    Args:
        x: [T, n].
        experts, weights: [T, k], as from `route`.
        run: computes an expert, by its number, for rows of x.

    Returns:
        [T, n] in the dtype of x; sums are in float32.
    """
    num_tokens, top_k = experts.shape
    order = experts.flatten().sort(stable=True).indices
    counts = experts.flatten().bincount().tolist()
    outputs = torch.empty(num_tokens * top_k, x.shape[1], dtype=x.dtype)
    for expert, rows in enumerate(torch.split(order, counts)):
        if len(rows):
            outputs[rows] = run(expert, x.index_select(0, rows // top_k))
    ranks = outputs.view(num_tokens, top_k, -1).unbind(1)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for output, weight in zip(ranks, weights.unbind(1), strict=True):
        total += output * weight[:, None]
    return total.to(x.dtype)
