"""Norms of the residual stream in all variants: LayerNorm, norms and scales of what is added.

Shapes: n rows of `hidden` values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.norm import block_of
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import STORAGE_TYPES, check, kernel, name_of, vectors_in

_ADDS, _CENTERED, _POST_NORM, _POST_BIAS, _NORM, _BIAS = (1 << bit for bit in range(6))
_VECTORS_PER_THREAD = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Affine:
    """What a norm multiplies with and adds.

    Attributes:
        weight: [hidden] float32.
        bias: as weight; None for zero.
    """

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Addend:
    """What is added to the residual stream: scale * norm(x).

    Attributes:
        x: [n, hidden].
        norm: of x; None for none.
        scale: of what is added.
    """

    x: Tensor
    norm: Affine | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class NormParams:
    """Parameters of norms.

    Attributes:
        eps: added to the mean square, or the variance.
        centered: LayerNorm (arXiv:1607.06450) instead of RMSNorm (arXiv:1910.07467).
    """

    eps: float
    centered: bool = False


def add_norm(
    addend: Addend,
    total: Tensor,
    params: NormParams,
    *,
    out: Tensor,
    norm: Affine | None,
    is_new: bool = False,
    pdl: bool = False,
) -> None:
    """total + addend -> total, and norm of that -> out.

    Args:
        addend: what is added.
        total: [n, hidden] float32, the residual stream.
        params: of both norms.
        out: [n, hidden] of the addend's type; may alias it.
        norm: of the stream; None to copy it.
        is_new: whether `total` has no values yet, and is taken for zero.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or a row that does not fit in a block.
    """
    x = addend.x
    storage = name_of(STORAGE_TYPES, "x", x)
    shape = num_rows, hidden = x.shape
    check("x", x, shape, x.dtype)
    check("out", out, shape, x.dtype)
    check("total", total, shape, torch.float32)
    flags = _ADDS * (not is_new) | _CENTERED * params.centered
    operands = []
    for name, affine, bits in (
        ("addend.norm", addend.norm, (_POST_NORM, _POST_BIAS)),
        ("norm", norm, (_NORM, _BIAS)),
    ):
        for part, bit in zip(("weight", "bias"), bits, strict=True):
            tensor = None if affine is None else getattr(affine, part)
            if tensor is not None:
                check(f"{name}.{part}", tensor, (hidden,), torch.float32)
                flags |= bit
            operands.append(total if tensor is None else tensor)  # not read
    per_thread, threads = block_of(vectors_in("hidden", hidden, x.dtype), hidden, torch.float32)
    if num_rows:
        kernel("residual_norm", f"add_norm<{storage}, {per_thread}>")(
            num_rows,
            threads,
            x,
            total,
            out,
            *operands,
            hidden,
            params.eps,
            addend.scale,
            flags,
            pdl=pdl,
        )


def norm_columns(x: Tensor, first: int, weight: Tensor, eps: float, *, pdl: bool = False) -> None:
    """RMSNorm (arXiv:1910.07467) of some columns of x as one row, in place.

    Args:
        x: [n, stride].
        first: the first of these columns.
        weight: [width] float32; so many columns.
        eps: added to the mean square.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or a row that does not fit in a block.
    """
    storage = name_of(STORAGE_TYPES, "x", x)
    num_rows, stride = x.shape
    (width,) = weight.shape
    check("x", x, (num_rows, stride), x.dtype)
    check("weight", weight, (width,), torch.float32)
    vectors_in("stride", stride, x.dtype)
    vectors_in("first", first, x.dtype)
    if first + width > stride:
        raise ValueError(f"columns {first} to {first + width} of {stride}")
    per_thread, threads = block_of(vectors_in("width", width, x.dtype), width, torch.float32)
    if num_rows:
        kernel("residual_norm", f"norm_columns<{storage}, {per_thread}>")(
            num_rows, threads, x, weight, stride, first, width, eps, pdl=pdl
        )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = tuple(
        f"{name}<{storage}, {per_thread}>"
        for name in ("add_norm", "norm_columns")
        for dtype, storage in STORAGE_TYPES.items()
        # Sums in float32 take twice the room of 16 bits.
        for per_thread in _VECTORS_PER_THREAD[: None if dtype == torch.float32 else -1]
    )
    return [("residual_norm", names, ())]
