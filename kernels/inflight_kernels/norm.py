"""RMSNorm with the residual sum before it. Shapes: n rows of `hidden` values."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.compile import Instantiation
from inflight_kernels.launch import STORAGE_TYPES, check, kernel, name_of, vectors_in

_MAX_THREADS = 512
_VECTORS_PER_THREAD = (1, 2, 4, 8)

MAX_HIDDEN_BYTES = 16 * _MAX_THREADS * _VECTORS_PER_THREAD[-1]
"""A row stays in the registers of one block: 16384 values of float32, 32768 of 16 bits."""


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    total: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Root-mean-square norm (arXiv:1910.07467) of x + residual -> out, and that sum -> total.

    The sum is rounded to its storage type first, and that is what is normalised.

    Args:
        x: [n, hidden].
        weight: [hidden].
        eps: added to the mean of squares.
        residual: [n, hidden]; None for zero, and then there is no total.
        out: [n, hidden]; may be x or residual.
        total: [n, hidden]; may be x or residual, but not out.
        pdl: see `Kernel`; the kernel before must not write `weight`, which is read early.

    Raises:
        ValueError: for operands of other shapes or types, or a row of more than MAX_HIDDEN_BYTES.
    """
    storage = name_of(STORAGE_TYPES, "x", x)
    num_rows, hidden = x.shape
    check("x", x, (num_rows, hidden), x.dtype)
    check("weight", weight, (hidden,), x.dtype)
    check("out", out, (num_rows, hidden), x.dtype)
    if (residual is None) != (total is None):
        raise ValueError("residual and total come together: the sum needs both")
    if residual is not None and total is not None:
        check("residual", residual, (num_rows, hidden), x.dtype)
        check("total", total, (num_rows, hidden), x.dtype)
        if num_rows and total.data_ptr() == out.data_ptr():
            raise ValueError("total and out are the same memory; each needs its own")
    per_thread, threads = _block(vectors_in("hidden", hidden, x.dtype), hidden)
    if not num_rows:
        return
    kernel("norm", _name(storage, per_thread, residual is not None))(
        num_rows,
        threads,
        x,
        x if residual is None else residual,
        weight,
        out if total is None else total,
        out,
        hidden,
        eps,
        pdl=pdl,
    )


def _block(vectors: int, hidden: int) -> tuple[int, int]:
    """(vectors per thread, threads) that cover a row with as many threads as are useful."""
    for per_thread in _VECTORS_PER_THREAD:
        threads = -(-vectors // (32 * per_thread)) * 32
        if threads <= _MAX_THREADS:
            return per_thread, threads
    raise ValueError(
        f"a row of {hidden} values is {vectors * 16} bytes; at most {MAX_HIDDEN_BYTES} fit a block"
    )


def _name(storage: str, per_thread: int, adds: bool) -> str:
    return f"rms_norm<{storage}, {per_thread}, {'true' if adds else 'false'}>"


def kernels_of(hidden: int, dtype: torch.dtype, adds: bool) -> list[tuple[str, str]]:
    """Stem and name of the kernel for such rows.

    Args:
        hidden: values in a row.
        dtype: of them.
        adds: whether there is a residual.

    Raises:
        ValueError: for rows that `rms_norm` does not take.
    """
    per_thread, _ = _block(vectors_in("hidden", hidden, dtype), hidden)
    return [("norm", _name(STORAGE_TYPES[dtype], per_thread, adds))]


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    names = tuple(
        _name(storage, per_thread, adds)
        for storage in STORAGE_TYPES.values()
        for per_thread in _VECTORS_PER_THREAD
        for adds in (True, False)
    )
    return [("norm", names, ())]
