"""Matrices of 8-bit values with a scale for each row, and their quantisation. Shapes: n rows of
`width` values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    STORAGE_TYPES,
    VECTOR_BYTES,
    check,
    check_memory,
    kernel,
    name_of,
    vectors_in,
)

_MAX_THREADS = 512
_VECTORS_PER_THREAD = (1, 2, 4, 8)

MAX_WIDTH = VECTOR_BYTES // 2 * _MAX_THREADS * _VECTORS_PER_THREAD[-1]
"""A row of 16-bit values is kept in the registers of one block."""

_TYPES = {dtype: name for dtype, name in STORAGE_TYPES.items() if dtype.itemsize == 2}


class ScaledRows(NamedTuple):
    """A quantised matrix: row i is scales[i] * values[i].

    Attributes:
        values: [n, width] of one of BYTE_TYPES, contiguous.
        scales: [n] float32.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(
        cls,
        num_rows: int,
        width: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> ScaledRows:
        """A matrix of zeros with values of this type."""
        values = torch.zeros(num_rows, width, dtype=torch.uint8, device=device).view(dtype)
        return cls(values, torch.zeros(num_rows, device=device))

    def first(self, num_rows: int) -> ScaledRows:
        """The first rows."""
        return ScaledRows(self.values[:num_rows], self.scales[:num_rows])

    def check(self, name: str, num_rows: int, width: int) -> str:
        """Check it as an operand of a kernel; returns the C++ type of its values.

        Raises:
            ValueError: with the name of the operand, what it is and what is expected.
        """
        value_type = name_of(BYTE_TYPES, f"{name}.values", self.values)
        check(f"{name}.values", self.values, (num_rows, width), self.values.dtype)
        check(f"{name}.scales", self.scales, (num_rows,), torch.float32, vectors=False)
        return value_type


def quantize_rows(x: Tensor, *, out: ScaledRows, pdl: bool = False) -> None:
    """Quantise each row by its largest magnitude, which becomes the largest value.

    Products with a row that has NaN or infinity are NaN.

    Args:
        x: [n, width] of 16-bit floats, width <= MAX_WIDTH and a multiple of 16; rows may be strided
            by a multiple of 8 values.
        out: [n, width]; the type of its values is that to which x is quantised.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    storage = name_of(_TYPES, "x", x)
    num_rows, width = x.shape
    vectors = vectors_in("width", width, x.dtype)
    if width > MAX_WIDTH or width % VECTOR_BYTES:
        raise ValueError(
            f"a row has {width} values; allowed: multiples of {VECTOR_BYTES} up to {MAX_WIDTH}"
        )
    check_memory("x", x)
    if x.stride(1) != 1 or x.stride(0) % 8:
        raise ValueError(
            f"x has strides {x.stride()}; rows must be contiguous, their stride a multiple of 8"
        )
    value_type = out.check("out", num_rows, width)
    if not num_rows:
        return
    per_thread = next(count for count in _VECTORS_PER_THREAD if vectors <= count * _MAX_THREADS)
    threads = -(-vectors // (32 * per_thread)) * 32
    kernel("quantization", _name(value_type, storage, per_thread))(
        num_rows, threads, x, out.values, out.scales, width, x.stride(0), pdl=pdl
    )


def _name(value_type: str, storage: str, per_thread: int) -> str:
    return f"quantize_rows<{value_type}, {storage}, {per_thread}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = tuple(
        _name(value_type, storage, per_thread)
        for value_type in BYTE_TYPES.values()
        for storage in _TYPES.values()
        for per_thread in _VECTORS_PER_THREAD
    )
    return [("quantization", names, ())]
