"""Rows of tokens for their experts, and sums of what the experts compute.

Shapes: T tokens, k experts per token, d columns.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.ops.linear.operands import STORAGE_TYPES as LINEAR_TYPES
from inflight_kernels.ops.linear.operands import Operand, values_of
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe.routing import Routed, block_tokens
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    STORAGE_TYPES,
    check,
    check_memory,
    kernel,
    name_of,
    vectors_in,
)

_MAX_THREADS = 256


def gather(x: Tensor, routed: Routed, *, num_tokens: int, out: Operand, pdl: bool = False) -> None:
    """Copy each token's row to the rows of its experts, or quantise it on the way.

    Args:
        x: [T or more, d] of 16 bits.
        routed: from `route` of the same tokens.
        num_tokens: T.
        out: [T * k or more, d] of x's type, or quantised.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    target, (_, width), top_k = values_of(out), x.shape, routed.top_k
    if len(x) < num_tokens or len(target) < num_tokens * top_k or target.shape[1] != width:
        raise ValueError(
            f"x is {list(x.shape)} and out {list(target.shape)}; expected {num_tokens} rows and "
            f"{top_k} times as many, equally wide"
        )
    storage = name_of(LINEAR_TYPES, "x", x)
    check_memory("x", x)
    vectors = vectors_in("d", width, x.dtype)
    stride = vectors_in("the stride of x", x.stride(0), x.dtype)
    targets: tuple[Tensor, ...]
    if isinstance(out, ScaledRows):
        value_type = out.check("out", len(target), width)
        name, targets = _quantize_name(value_type, storage), (target, out.scales)
    else:
        check("out", target, (len(target), width), x.dtype)
        name, targets = "gather_rows", (target,)
    if num_tokens:
        kernel("rows", name)(
            num_tokens,
            min(_MAX_THREADS, -(-vectors // 32) * 32),
            x,
            stride,
            routed.experts,
            routed.starts,
            routed.positions,
            *targets,
            vectors,
            routed.num_experts,
            top_k,
            block_tokens(num_tokens),
            num_tokens,
            pdl=pdl,
        )


def _quantize_name(value_type: str, storage: str) -> str:
    return f"quantize_gathered_rows<{value_type}, {storage}>"


def sum_of_experts(
    rows: Tensor,
    routed: Routed,
    shared: Tensor | None = None,
    *,
    total: Tensor,
    adds: bool = False,
    pdl: bool = False,
) -> None:
    """What each token's experts computed, times their weights, in the order of their scores.

    Args:
        rows: [T * k or more, d], from a product.
        routed: of the same tokens.
        shared: [T, d], of the shared expert, if there is one.
        total: [T, d], of the same type.
        adds: whether the sum is added to `total`.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    num_tokens, width = total.shape
    if len(rows) < num_tokens * routed.top_k:
        raise ValueError(f"{len(rows)} rows; expected {num_tokens * routed.top_k}")
    storage = name_of(STORAGE_TYPES, "rows", rows)
    check("rows", rows, (len(rows), width), rows.dtype)
    check("total", total, (num_tokens, width), rows.dtype)
    if shared is not None:
        check("shared", shared, (num_tokens, width), rows.dtype)
    vectors = vectors_in("d", width, rows.dtype)
    if num_tokens:
        kernel("rows", f"sum_of_experts<{storage}, {'true' if adds else 'false'}>")(
            num_tokens,
            min(_MAX_THREADS, max(-(-vectors // 32), -(-(routed.top_k + 1) // 32)) * 32),
            rows,
            routed.positions,
            routed.weights,
            0 if shared is None else shared,
            total,
            width,
            routed.top_k,
            pdl=pdl,
        )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    sums = tuple(
        f"sum_of_experts<{storage}, {adds}>"
        for storage in STORAGE_TYPES.values()
        for adds in ("false", "true")
    )
    quantized = tuple(
        _quantize_name(value, storage)
        for value in BYTE_TYPES.values()
        for storage in LINEAR_TYPES.values()
    )
    return [("rows", ("gather_rows", *quantized, *sums), ())]
