"""RMSNorm with fused residual addition. Shapes: n rows of `hidden` values."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.ops.linear.scaled_rows import QUANTIZING_TYPES, ScaledRows
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    STORAGE_TYPES,
    check,
    fewest_vectors,
    kernel,
    name_of,
    vectors_in,
)

_MAX_THREADS = 512
_VECTORS_PER_THREAD = (1, 2, 4, 8)

_ROWS_AT_ONCE = 4
"""Of a block, if there are many rows; its threads have several vectors of each."""

_QUANTIZED_TYPES = {torch.bfloat16: STORAGE_TYPES[torch.bfloat16]}
"""Types of x whose norm can be quantised."""

MAX_HIDDEN_BYTES = 16 * _MAX_THREADS * _VECTORS_PER_THREAD[-1]
"""A row is kept in the registers of one block: 16384 float32 values, or 32768 of 16 bits."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    out: Tensor | ScaledRows,
    total: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Root-mean-square norm (arXiv:1910.07467) of x + residual -> out, and that sum -> total.

    The sum is rounded to its storage type before it is normalised.

    Args:
        x: [n, hidden].
        weight: [hidden] float32.
        eps: added to the mean square.
        residual: [n, hidden], of the total's type; None for zero: then total is None, or x in
            float32.
        out: [n, hidden]; may alias x or, if of the same type, residual. If it is to be quantised,
            and then spread as it says, x is bfloat16.
        total: [n, hidden], of x's type or float32; may alias residual or, if of the same type, x,
            but not out.
        pdl: see `Kernel`; the preceding kernel must not write `weight`, which is read early.

    Raises:
        ValueError: wrong shape or type of an operand, or a row of more than MAX_HIDDEN_BYTES.
    """
    storage = name_of(STORAGE_TYPES, "x", x)
    num_rows, hidden = x.shape
    outputs, value_type, spread_bits = _check_rows(x, weight, out)
    widens = total is not None and total.dtype != x.dtype
    sum_type = torch.float32 if widens else x.dtype
    if (residual is None) != (total is None) and not (widens and residual is None):
        raise ValueError("residual and total must be given together")
    _check_sums(residual, total, x.shape, sum_type, outputs[0])
    fewest = fewest_vectors(num_rows) if residual is None else 1
    per_thread, threads = block_of(vectors_in("hidden", hidden, x.dtype), hidden, sum_type, fewest)
    if not num_rows:
        return
    name = _name(storage, STORAGE_TYPES[sum_type], per_thread, residual is not None)
    if isinstance(out, ScaledRows):
        name = _scaled_name(value_type, name, out.spreads)
    at_once = _ROWS_AT_ONCE if fewest > 1 else 1
    kernel("norm", name)(
        -(-num_rows // at_once),
        threads,
        x,
        x if residual is None else residual,
        weight,
        outputs[0] if total is None else total,
        *outputs,
        num_rows,
        at_once,
        hidden,
        eps,
        *spread_bits,
        pdl=pdl,
    )


def _check_rows(
    x: Tensor, weight: Tensor, out: Tensor | ScaledRows
) -> tuple[tuple[Tensor, ...], str, tuple[int, ...]]:
    """Check these operands; returns the tensors of out, and if it is to be quantised the C++ type
    of its values and how it is spread."""
    check("x", x, tuple(x.shape), x.dtype)
    check("weight", weight, tuple(x.shape[1:]), torch.float32)
    if isinstance(out, ScaledRows):
        name_of(_QUANTIZED_TYPES, "x", x)
        value_type = out.check("out", *x.shape, may_be_spread=True)
        return (out.values, out.scales), value_type, (out.spread_bits,)
    check("out", out, tuple(x.shape), x.dtype)
    return (out,), "", ()


def _check_sums(
    residual: Tensor | None,
    total: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    out: Tensor,
) -> None:
    """Check these operands, of such a shape and type, beside the values of out."""
    for name, tensor in (("residual", residual), ("total", total)):
        if tensor is not None:
            check(name, tensor, shape, dtype)
    if total is not None and len(total) and _same_memory(total, out):
        raise ValueError("total and out must not share memory")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    # While launches are recorded, tensors have no memory.
    return a.data_ptr() == b.data_ptr() and not a.is_meta


def _name(storage: str, sum_type: str, per_thread: int, adds: bool) -> str:
    return f"rms_norm<{storage}, {sum_type}, {per_thread}, {'true' if adds else 'false'}>"


def _scaled_name(value_type: str, name: str, spreads: str) -> str:
    return f"scaled_{name.replace('<', f'<{value_type}, ', 1)[:-1]}{spreads}>"


def block_of(vectors: int, hidden: int, sum_type: torch.dtype, fewest: int = 1) -> tuple[int, int]:
    """(vectors per thread, threads) for a row, with as many threads as are useful.

    Args:
        vectors: in a row.
        hidden: values in a row.
        sum_type: of the residual.
        fewest: vectors of a thread, at least: 1 or 2. Results do not depend on it.

    Raises:
        ValueError: a row of more than MAX_HIDDEN_BYTES.
    """
    if hidden * sum_type.itemsize <= MAX_HIDDEN_BYTES:
        for per_thread in _VECTORS_PER_THREAD[fewest - 1 :]:
            threads = -(-vectors // (32 * per_thread)) * 32
            if threads <= _MAX_THREADS:
                return per_thread, threads
    raise ValueError(
        f"a row of {hidden} values is {hidden * sum_type.itemsize} bytes; at most "
        f"{MAX_HIDDEN_BYTES} fit in a block"
    )


def vectors_per_thread(*, widens: bool) -> tuple[int, ...]:
    """What `block_of` may find, for sums that are wider than x, or are not."""
    return _VECTORS_PER_THREAD[:-1] if widens else _VECTORS_PER_THREAD


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    wide = STORAGE_TYPES[torch.float32]
    kinds = [(storage, storage) for storage in STORAGE_TYPES.values()]
    kinds += [(storage, wide) for storage in STORAGE_TYPES.values() if storage != wide]
    names = tuple(
        _name(storage, sum_type, per_thread, adds)
        for storage, sum_type in kinds
        for per_thread in vectors_per_thread(widens=sum_type != storage)
        for adds in (True, False)
    )
    quantized = tuple(
        _scaled_name(value_type, name, spreads)
        for value_type, spreads in QUANTIZING_TYPES
        for name in names
        if name.startswith(tuple(f"rms_norm<{storage}," for storage in _QUANTIZED_TYPES.values()))
    )
    return [("norm", names + quantized, ())]
