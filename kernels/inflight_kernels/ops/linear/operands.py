"""Operands of the linear kernels: x @ weight.T + bias, gated or not, + residual -> out.

Shapes: m tokens, k inputs, n rows of the weight, which are gate | up if gated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.ops.linear.grouped_rows import RECORD_ROWS, GroupedRows
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.runtime.launch import BYTE_TYPES, check, check_memory, name_of

STORAGE_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
"""Types of x and the weight, unless they are quantised: torch dtype -> C++ type."""

SCALED_OUT_TYPES = {torch.bfloat16: "__nv_bfloat16"}
"""Types of bias, residual and out of a product of quantised matrices."""

OUT_TYPES = {**STORAGE_TYPES, torch.float32: "float"}

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory per block on Hopper."""

STAGE_DEPTH_BYTES = 128
"""Bytes of each row in a pipeline stage."""

Operand = Tensor | ScaledRows
"""x or a weight; both are quantised, or none of them."""


class NormedRows(NamedTuple):
    """x as the root-mean-square norm of some rows, computed by the kernel that multiplies it.

    Attributes:
        rows: [m, k] bfloat16.
        weight: [k] float32, of the norm.
        eps: of the norm.
    """

    rows: Tensor
    weight: Tensor
    eps: float


MAX_SUMMED_ROWS = 8


class SummedRows(NamedTuple):
    """x as the root-mean-square norm of sums of rows, computed by the kernel that takes it.

    Attributes:
        rows: [m, k] bfloat16, m at most MAX_SUMMED_ROWS.
        residual: [m, k] float32.
        total: [m, k] float32, where the kernel writes the sum; not the memory of `residual`.
        weight: [k] float32, of the norm.
        eps: of the norm.
    """

    rows: Tensor
    residual: Tensor
    total: Tensor
    weight: Tensor
    eps: float


Input = Operand | NormedRows | SummedRows
"""x of some kernel."""


class LinearOperands(NamedTuple):
    """Validated operands.

    Attributes:
        m, n, k: see above.
        storage: type of x and the weight, or if they are quantised, of the others.
        out_type: of out.
        value_type: of the weight, and of x unless the kernel quantises it; empty if they are not
            quantised.
        scales: of x's rows and of the weight's; empty if they are not quantised.
        depth: columns in a pipeline stage.
    """

    m: int
    n: int
    k: int
    storage: str
    out_type: str
    value_type: str
    scales: tuple[Tensor, ...]
    depth: int


def values_of(matrix: Operand) -> Tensor:
    """The values of a matrix, without scales."""
    return matrix.values if isinstance(matrix, ScaledRows) else matrix


def check_linear_operands(
    x: Operand,
    weight: Operand,
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
        weight: [n, k], k a multiple of 8, or of 16 if it is quantised; x is, too, if it is.
        bias: [n].
        residual: [m, n], or [m, n / 2] when gated.
        out: of the residual's shape; of x's type or float32, float32 only when not gated;
            bfloat16 if x is quantised, as bias and residual then are.
        gated: whether the weight is gate | up.
        whole_vectors: whether rows of out are read and written in vectors of 8 values.
        max_tokens: maximum m; None for no limit.

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    if isinstance(x, ScaledRows) != isinstance(weight, ScaledRows):
        raise ValueError("x and weight must both be quantised, or none of them")
    values, rows = values_of(x), values_of(weight)
    m, n, k = _check_shapes(values, rows, max_tokens)
    _check_weight_shape(n, k, 16 // rows.itemsize, gated)
    if whole_vectors and (n // 2 if gated else n) % 8:
        raise ValueError(
            f"weight is [{n}, {k}]; n, or half of it when gated, must be a multiple of 8"
        )
    value_type = ""
    scales: tuple[Tensor, ...] = ()
    if isinstance(x, ScaledRows) and isinstance(weight, ScaledRows):
        storage, dtype = name_of(SCALED_OUT_TYPES, "out", out), out.dtype
        value_type, scales = _check_scaled(x, weight), (x.scales, weight.scales)
    else:
        storage, dtype = name_of(STORAGE_TYPES, "x", values), values.dtype
        check("weight", rows, (n, k), dtype)
        _check_rows("x", values)
    out_dtype = _check_outputs(bias, residual, out, (m, n), dtype, gated, whole_vectors)
    depth = STAGE_DEPTH_BYTES // rows.itemsize
    return LinearOperands(m, n, k, storage, OUT_TYPES[out_dtype], value_type, scales, depth)


def check_quantizing_operands(
    x: Tensor | NormedRows,
    weight: ScaledRows,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
) -> LinearOperands:
    """Validate the operands of a kernel that quantises x itself.

    Args:
        x: [m, k] bfloat16; the stride of rows is a multiple of 8 values.
        weight: [n, k], k a multiple of 16.
        bias, residual, out: as in `check_linear_operands`, bfloat16.
        gated: whether the weight is gate | up.

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    rows = x.rows if isinstance(x, NormedRows) else x
    storage = name_of(SCALED_OUT_TYPES, "x", rows)
    (m, k), n = rows.shape, len(weight.values)
    _check_weight_shape(n, k, 16, gated)
    value_type = weight.check("weight", n, k, may_be_spread=True)
    _check_rows("x", rows)
    if isinstance(x, NormedRows):
        check("the norm's weight", x.weight, (k,), torch.float32)
    out_dtype = _check_outputs(bias, residual, out, (m, n), rows.dtype, gated, False)
    if out_dtype != rows.dtype:
        raise ValueError(f"out is {out.dtype}; expected {rows.dtype}")
    return LinearOperands(
        m, n, k, storage, storage, value_type, (weight.scales,), STAGE_DEPTH_BYTES
    )


def check_gate_operands(
    x: ScaledRows, weight: ScaledRows, bias: Tensor | None, out: ScaledRows
) -> tuple[int, int, int, str]:
    """Validate the operands of a kernel that quantises what it returns, silu(gate) * up.

    Args:
        x: [m, k] of e4m3.
        weight: [n, k] of e4m3, gate | up, k and half of n multiples of 16.
        bias: [n] bfloat16.
        out: [m, n / 2] of e4m3.

    Returns:
        (m, n, k, type of the bias).

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    m, n, k = _check_shapes(x.values, weight.values, None)
    _check_weight_shape(n, k, 16, gated=True)
    if n % 32:
        raise ValueError(f"weight is [{n}, {k}]; half of n must be a multiple of 16")
    types = {_check_scaled(x, weight), out.check("out", m, n // 2)}
    if types != {BYTE_TYPES[torch.float8_e4m3fn]}:
        raise ValueError(
            f"weight.values is {weight.values.dtype} and out.values {out.values.dtype}; both must "
            f"be {torch.float8_e4m3fn}, as only that has room for coarse scales"
        )
    (dtype, storage), *_ = SCALED_OUT_TYPES.items()
    if bias is not None:
        check("bias", bias, (n,), dtype)
    return m, n, k, storage


class WeightOnlyOperands(NamedTuple):
    """Validated operands of a product of which only the weight is quantised.

    Attributes:
        m, n, k: see above.
        storage: type of all operands but the weight.
    """

    m: int
    n: int
    k: int
    storage: str


def check_weight_only_operands(
    x: Tensor,
    weight: ScaledRows,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    max_tokens: int,
) -> WeightOnlyOperands:
    """Validate the operands of a kernel that takes x as it is and a quantised weight.

    Args:
        x: [m, k]; the stride of rows is a multiple of 8 values.
        weight: [n, k], k a multiple of 16.
        bias, residual, out: as in `check_linear_operands`, of x's type.
        gated: whether the weight is gate | up.
        max_tokens: maximum m.

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    storage = name_of(STORAGE_TYPES, "x", x)
    m, n, k = _check_shapes(x, weight.values, max_tokens)
    _check_weight_shape(n, k, 16, gated)
    weight.check("weight", n, k)
    _check_rows("x", x)
    if _check_outputs(bias, residual, out, (m, n), x.dtype, gated, False) != x.dtype:
        raise ValueError(f"out is {out.dtype}; it must be {x.dtype} like x")
    return WeightOnlyOperands(m, n, k, storage)


def check_grouped_operands(
    x: Tensor,
    weight: GroupedRows,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    max_tokens: int | None = None,
) -> tuple[int, int, int]:
    """Validate the operands of a kernel whose weight has scales of groups.

    Args:
        x: [m, k] bfloat16; the stride of rows is a multiple of 8 values.
        weight: [n, k], k a multiple of 8.
        bias, residual, out: as in `check_linear_operands`.
        gated: whether the weight is gate | up; half of n is a multiple of RECORD_ROWS then.
        max_tokens: maximum m; None for no limit.

    Returns:
        (m, n, k).

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    name_of({torch.bfloat16: STORAGE_TYPES[torch.bfloat16]}, "x", x)
    n, k = weight.n, weight.k
    weight.check("weight", n, k)
    if x.dim() != 2 or x.shape[1] != k or (max_tokens is not None and len(x) > max_tokens):
        limit = "" if max_tokens is None else f" with up to {max_tokens} rows"
        raise ValueError(f"x is {list(x.shape)}; expected [m, {k}]{limit}")
    _check_weight_shape(n, k, 8, gated)
    if gated and n % (2 * RECORD_ROWS):
        raise ValueError(f"weight has {n} rows; a gated one has a multiple of {2 * RECORD_ROWS}")
    _check_rows("x", x)
    _check_outputs(bias, residual, out, (len(x), n), x.dtype, gated, False)
    return len(x), n, k


def check_dequantized(weight: ScaledRows, out: Tensor) -> tuple[int, int, str]:
    """Validate a quantised matrix [n, k] and the memory for it in 16 bits.

    Args:
        weight: [n, k], k a multiple of 16.
        out: [n, k].

    Returns:
        (n, k, type of out).

    Raises:
        ValueError: an operand is invalid; with what is required.
    """
    storage, (n, k) = name_of(STORAGE_TYPES, "out", out), weight.values.shape
    _check_weight_shape(n, k, 16, False)
    weight.check("weight", n, k)
    check("out", out, (n, k), out.dtype)
    return n, k, storage


def _check_shapes(x: Tensor, weight: Tensor, max_tokens: int | None) -> tuple[int, int, int]:
    """Returns (m, n, k)."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; they must be [m, k] and [n, k]"
        )
    (m, k), n = x.shape, weight.shape[0]
    if max_tokens is not None and m > max_tokens:
        raise ValueError(f"x has {m} rows; allowed: up to {max_tokens}")
    return m, n, k


def _check_scaled(x: ScaledRows, weight: ScaledRows) -> str:
    """Returns the C++ type of their values."""
    x.check("x", *x.values.shape, may_be_spread=True)
    value_type = weight.check("weight", *weight.values.shape, may_be_spread=True)
    if x.spread != weight.spread:
        raise ValueError(
            f"x is spread in blocks of {x.spread} columns and weight of {weight.spread}; they must "
            "be spread alike"
        )
    if x.values.dtype != weight.values.dtype:
        raise ValueError(
            f"x.values is {x.values.dtype} and weight.values {weight.values.dtype}; they must "
            "have the same type"
        )
    return value_type


def _check_weight_shape(n: int, k: int, unit: int, gated: bool) -> None:
    if k % unit or k == 0 or (gated and n % 2):
        raise ValueError(
            f"weight is [{n}, {k}]; k must be a multiple of {unit}, and n even when gated"
        )


def _check_outputs(
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    gated: bool,
    vectors: bool,
) -> torch.dtype:
    """Check bias, residual and out, of which only the latter may be float32; returns its type."""
    m, n = shape
    width = n // 2 if gated else n
    if gated and out.dtype != dtype:
        raise ValueError(f"out is {out.dtype}; if gated, it must be {dtype} like x")
    out_dtype = dtype if out.dtype == dtype else torch.float32
    check("out", out, (m, width), out_dtype, vectors=vectors)
    if bias is not None:
        check("bias", bias, (n,), dtype, vectors=vectors)
    if residual is not None:
        check("residual", residual, (m, width), dtype, vectors=vectors)
    return out_dtype


def _check_rows(name: str, matrix: Tensor) -> None:
    check_memory(name, matrix)
    if matrix.stride(1) != 1 or matrix.stride(0) % 8:
        raise ValueError(
            f"{name} has strides {matrix.stride()}; rows must be contiguous, their stride a "
            "multiple of 8"
        )
