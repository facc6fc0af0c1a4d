"""Sums of what experts compute, added to the residual stream, and RMSNorm of the stream.

Shapes: T tokens, k experts per token, d columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.ops.linear.operands import Operand, values_of
from inflight_kernels.ops.linear.scaled_rows import QUANTIZING_TYPES, ScaledRows
from inflight_kernels.ops.moe.routing import Routed
from inflight_kernels.ops.norm import block_of, vectors_per_thread
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    STORAGE_TYPES,
    check,
    kernel,
    name_of,
    vectors_in,
)

_TYPES = {torch.bfloat16: STORAGE_TYPES[torch.bfloat16]}
"""Types of experts' rows."""

_TOTAL_TYPES = {**_TYPES, torch.float32: STORAGE_TYPES[torch.float32]}


class ExpertRows(NamedTuple):
    """What experts computed for some tokens, to be summed.

    Attributes:
        rows: [T * k or more, d] bfloat16, from a product.
        routed: of the same tokens.
        shared: [T, d] bfloat16, of the shared expert, if there is one.
    """

    rows: Tensor
    routed: Routed
    shared: Tensor | None


def sum_rms_norm(
    x: ExpertRows, weight: Tensor, eps: float, *, total: Tensor, out: Operand, pdl: bool = False
) -> None:
    """Add each token's experts, times their weights and in the order of their scores, to `total`;
    its root-mean-square norm (arXiv:1910.07467) -> out.

    As `rows.sum_of_experts` and `norm.rms_norm`, but the sum of experts is not rounded by itself.

    Args:
        x: of T tokens.
        weight: [d] float32, of the norm.
        eps: added to the mean square.
        total: [T, d] bfloat16 or float32, the residual stream.
        out: [T, d] bfloat16, or quantised, and then spread as it says.
        pdl: see `Kernel`; the preceding kernel must not write `weight`, which is read early.

    Raises:
        ValueError: wrong shape or type of an operand, or a row that is too long for a block.
    """
    num_tokens, width = total.shape
    routed = x.routed
    if len(x.rows) < num_tokens * routed.top_k:
        raise ValueError(f"{len(x.rows)} rows; expected {num_tokens * routed.top_k}")
    storage = name_of(_TYPES, "rows", x.rows)
    sum_type = name_of(_TOTAL_TYPES, "total", total)
    check("rows", x.rows, (len(x.rows), width), x.rows.dtype)
    check("total", total, (num_tokens, width), total.dtype)
    check("weight", weight, (width,), torch.float32)
    if x.shared is not None:
        check("shared", x.shared, (num_tokens, width), x.rows.dtype)
    value_type = spreads = ""
    outputs: tuple[Tensor, ...] = (values_of(out),)
    spread_bits: tuple[int, ...] = ()
    if isinstance(out, ScaledRows):
        value_type = out.check("out", num_tokens, width, may_be_spread=True)
        outputs, spread_bits = (out.values, out.scales), (out.spread_bits,)
        spreads = out.spreads
    else:
        check("out", out, (num_tokens, width), x.rows.dtype)
    vectors = vectors_in("d", width, x.rows.dtype)
    per_thread, threads = block_of(vectors, width, total.dtype)
    if not num_tokens:
        return
    kernel("sum_norm", _name(value_type, storage, sum_type, per_thread, spreads))(
        num_tokens,
        threads,
        x.rows,
        routed.positions,
        routed.weights,
        0 if x.shared is None else x.shared,
        routed.top_k,
        weight,
        total,
        *outputs,
        width,
        eps,
        *spread_bits,
        pdl=pdl,
    )


def _name(value_type: str, storage: str, sum_type: str, per_thread: int, spreads: str) -> str:
    if value_type:
        return f"scaled_sum_rms_norm<{value_type}, {storage}, {sum_type}, {per_thread}{spreads}>"
    return f"sum_rms_norm<{storage}, {sum_type}, {per_thread}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = tuple(
        _name(value_type, storage, sum_type, per_thread, spreads)
        for storage in _TYPES.values()
        for sum_type in _TOTAL_TYPES.values()
        for per_thread in vectors_per_thread(widens=sum_type != storage)
        for value_type, spreads in (("", ""), *QUANTIZING_TYPES)
    )
    return [("sum_norm", names, ())]
