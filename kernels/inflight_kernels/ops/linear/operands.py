"""Operands of the linear kernels: x @ weight.T + bias, gated or not, + residual -> out.

Shapes: m tokens, k inputs, n rows of the weight, which are gate | up if gated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.runtime.launch import check, check_memory, name_of

STORAGE_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
"""Types of x and the weight: torch dtype -> C++ type."""

OUT_TYPES = {**STORAGE_TYPES, torch.float32: "float"}

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory per block on Hopper."""


class LinearOperands(NamedTuple):
    """Validated operands.

    Attributes:
        m, n, k: see above.
        storage: type of x and the weight.
        out_type: of out.
    """

    m: int
    n: int
    k: int
    storage: str
    out_type: str


def check_linear_operands(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    whole_vectors: bool,
    max_tokens: int | None = None,
) -> LinearOperands:
    """Validate the operands of a linear kernel.

    Args:
        x: [m, k]; the stride of rows is a multiple of 8 values.
        weight: [n, k], k a multiple of 8.
        bias: [n].
        residual: [m, n], or [m, n / 2] when gated.
        out: of the residual's shape; of x's type or float32, float32 only when not gated.
        gated: whether the weight is gate | up.
        whole_vectors: whether rows of out are read and written in vectors of 8 values.
        max_tokens: maximum m; None for no limit.

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    storage = name_of(STORAGE_TYPES, "x", x)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; they must be [m, k] and [n, k]"
        )
    (m, k), n = x.shape, weight.shape[0]
    width = n // 2 if gated else n
    if max_tokens is not None and m > max_tokens:
        raise ValueError(f"x has {m} rows; allowed: up to {max_tokens}")
    if k % 8 or k == 0 or (gated and n % 2):
        raise ValueError(f"weight is [{n}, {k}]; k must be a multiple of 8, and n even when gated")
    if whole_vectors and width % 8:
        raise ValueError(
            f"weight is [{n}, {k}]; n, or half of it when gated, must be a multiple of 8"
        )
    if gated and out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype}; if gated, it must be {x.dtype} like x")
    out_dtype = x.dtype if out.dtype == x.dtype else torch.float32
    check("weight", weight, (n, k), x.dtype)
    check("out", out, (m, width), out_dtype, vectors=whole_vectors)
    if bias is not None:
        check("bias", bias, (n,), x.dtype, vectors=whole_vectors)
    if residual is not None:
        check("residual", residual, (m, width), x.dtype, vectors=whole_vectors)
    check_memory("x", x)
    if x.stride(1) != 1 or x.stride(0) % 8:
        raise ValueError(
            f"x has strides {x.stride()}; rows must be contiguous, their stride a multiple of 8"
        )
    return LinearOperands(m, n, k, storage, OUT_TYPES[out_dtype])
