"""Norms of queries and keys whose keys lose less by being rounded to INT8.

A key in an INT8 KV cache has one step for all of its columns, which the largest one sets. Where a
norm's weight makes a few columns of all keys large, all others are rounded coarsely. Dividing these
columns of keys, and multiplying those of queries, leaves every score as it is: the idea of
SmoothQuant (arXiv:2211.10438), between the factors of a score.

Norms precede or follow RoPE, which rotates pairs of columns, so that both of a pair have the same
factor. Factors are powers of two: a score changes by no bit, and nor do logits, if keys are not
rounded. FP8 has steps for each column by itself, and gains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.layers.norm import NormWeights

# Of the mean: smaller columns count as being so large. They hardly matter to a score.
_SMALLEST = 2.0**-8
_TINY = 1e-30  # where all are zero


def balanced(
    q_norm: NormWeights, k_norm: NormWeights, head_dim: int
) -> tuple[NormWeights, NormWeights]:
    """Norms with which columns of keys are of similar size, and scores the same.

    Args:
        q_norm, k_norm: with weights [D] for all heads, [H, D] and [G, D], or [H * D] and [G * D];
            without a bias. RoPE rotates column i < D/2 of a head with column i + D/2.
        head_dim: D.
    """
    if k_norm.weight.is_meta:
        return q_norm, k_norm
    keys = _pairs(k_norm.weight.view(-1, 1, head_dim))
    queries = _pairs(q_norm.weight.view(len(keys), -1, head_dim))
    factors = torch.exp2((torch.log2(keys / queries) / 2).round())  # the square root
    factors = factors.float().repeat(1, 1, 2)  # [G or 1, 1, D]
    return _times(q_norm, factors), _times(k_norm, 1.0 / factors)


def _pairs(weights: Tensor) -> Tensor:
    """How large each pair of columns is, [n, 1, D / 2]: root mean square of n groups of heads with
    weights [n, heads, D], by their geometric mean."""
    half = weights.shape[-1] // 2
    squares = weights.double().square().view(*weights.shape[:2], 2, half).mean((1, 2), keepdim=True)
    sizes = squares.sqrt().squeeze(2)
    sizes = sizes.clamp(min=max(_SMALLEST * float(sizes.mean()), _TINY))
    return sizes / sizes.log().mean(-1, keepdim=True).exp()


def _times(norm: NormWeights, factors: Tensor) -> NormWeights:
    heads = norm.weight.view(len(factors), -1, factors.shape[-1]) * factors
    return NormWeights(heads.view(norm.weight.shape), norm.bias)
