"""Operands of latent attention (MLA, arXiv:2405.04434) around its kernel: the projections of a
step's tokens, and the norm of latents.

Shapes: T tokens, H query heads of n columns without position and ROTATED with it. A key has KEY
values, the first RANK of which, the latent, are the value as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.ops.rope import check_rows
from inflight_kernels.runtime.launch import check

RANK = 512
"""Values of a latent."""

ROTATED = 64
"""Columns of a key, and of each head of q, with positions."""

KEY = RANK + ROTATED
"""Values of a key in the cache."""

DTYPE = torch.bfloat16
"""Of activations, weights and the cache."""

STORAGE = "__nv_bfloat16"
"""The C++ type of DTYPE."""


class Projections(NamedTuple):
    """What a layer projects of its input: q and what a key is made of.

    Attributes:
        q: [T, H, n + ROTATED]; tokens may be strided, as in a slice of a fused projection.
        kv_a: [T, KEY], a latent before its norm, then what is rotated; tokens may be strided.
    """

    q: Tensor
    kv_a: Tensor

    def check_fits(self) -> None:
        """Check shapes, types and layout.

        Raises:
            ValueError: with the name of the operand.
        """
        num_tokens, _, width = self.q.shape
        check_heads_of_rows("q", self.q, width)
        check_rows("kv_a", self.kv_a, (num_tokens, KEY), DTYPE)


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """RMSNorm of latents.

    Attributes:
        weight: [RANK] float32.
        eps: of the norm.

    Raises:
        ValueError: wrong shape or type.
    """

    weight: Tensor
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check("the norm's weight", self.weight, (RANK,), torch.float32)


def check_heads_of_rows(name: str, tensor: Tensor, width: int) -> None:
    """Check heads [T, H, width] in DTYPE, contiguous in each token.

    Raises:
        ValueError: with the name of the operand.
    """
    num_tokens, num_heads, _ = tensor.shape
    check_rows(name, tensor, (num_tokens, num_heads, width), DTYPE)
    if tensor.stride(1) != width:
        raise ValueError(f"heads of {name} have stride {tensor.stride(1)}; expected {width}")


def check_cache(cache: Tensor) -> None:
    """Check the cache of a layer: [num_blocks, block_size, 1, KEY] in DTYPE; blocks may be strided.

    Raises:
        ValueError: wrong shape, type or layout; caches of 8 bits are not supported.
    """
    if cache.dtype.itemsize == 1:
        raise ValueError(
            f"the latent cache is {cache.dtype}; latent attention supports {DTYPE}, no cache of 8 "
            "bits"
        )
    num_blocks, block_size = cache.shape[:2]
    check_rows("the latent cache", cache, (num_blocks, block_size, 1, KEY), DTYPE)
    if cache.stride(1) != KEY:
        raise ValueError(
            f"slots of the latent cache have stride {cache.stride(1)}; expected {KEY}: only blocks "
            "may be strided"
        )
    if num_blocks * block_size >= 2**31:
        raise ValueError(f"a cache of {num_blocks} * {block_size} slots; allowed: up to 2**31 - 1")
