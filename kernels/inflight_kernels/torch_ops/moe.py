"""Mixtures of experts in torch: routing, and the sum of experts.

Shapes: T tokens in the step, E experts, k experts per token, n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts (arXiv:1701.06538), optionally from a few groups of them, as
    DeepSeek V2 and V3 do (arXiv:2405.04434, arXiv:2412.19437).

    Attributes:
        top_k: k.
        renormalize: whether the weights of a token's experts are divided by their sum.
        score: of an expert, from its logit.
        num_groups: into which the experts are divided evenly.
        top_groups: groups that a token's experts are in: those that are ranked highest.
        scale: multiplies weights.
        best_of_group: scores of a group that are added to rank it: its best one, as in DeepSeek V2,
            or its best two, as in V3.
    """

    top_k: int
    renormalize: bool
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    best_of_group: Literal[1, 2] = 2


def route(
    logits: Tensor, routing: Routing, select_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        logits: [T, E] float32, of the router.
        routing: how.
        select_bias: [E] float32, added to scores when experts are chosen, but not to weights.

    Returns:
        Experts [T, k] int64, the highest score first and of equal ones the lower number; their
        weights [T, k] float32.
    """
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    # Of softmax the logits have the same order, and are distinct where scores are rounded to 0.
    ranks = logits if routing.score == "softmax" else scores
    if select_bias is not None:
        ranks = scores + select_bias
    if routing.top_groups < routing.num_groups:
        grouped = ranks.view(len(ranks), routing.num_groups, -1)
        groups = grouped.sort(dim=-1, descending=True).values[..., : routing.best_of_group].sum(-1)
        chosen = _highest(groups, routing.top_groups)
        is_chosen = torch.zeros_like(groups, dtype=torch.bool).scatter(1, chosen, True)
        ranks = grouped.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)
    experts = _highest(ranks, routing.top_k)
    weights = scores.gather(1, experts)
    if routing.renormalize:
        # Sigmoids can all be 0.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


def _highest(scores: Tensor, count: int) -> Tensor:
    """The columns of the highest scores, in order; topk leaves that of equal ones open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


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
