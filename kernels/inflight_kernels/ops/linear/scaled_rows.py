"""Matrices of 8-bit values with a scale for each row, and their quantisation, before which those of
INT8 may be spread (see torch_ops/quantization.py). Shapes: n rows of `width` values."""

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
    fewest_vectors,
    kernel,
    name_of,
    vectors_in,
)
from inflight_kernels.torch_ops.quantization import MAX_SPREAD, MIN_SPREAD

_MAX_THREADS = 512
_VECTORS_PER_THREAD = (1, 2, 4, 8)

QUANTIZING_TYPES = (*((name, "") for name in BYTE_TYPES.values()), ("Int8", ", true"))
"""Types of values, and how kernels end that spread rows before they quantise them or do not."""

MAX_WIDTH = VECTOR_BYTES // 2 * _MAX_THREADS * _VECTORS_PER_THREAD[-1]
"""A row of 16-bit values is kept in the registers of one block."""

MIN_PART = 32
"""Columns with a scale of their own, at least, in `settle_rows`."""

# As in quantization.cu.
_ROWS_AT_ONCE = 8
_MAX_PARTS = 1024
_SETTLING = "settle_rows"
# Types of parts that are left.
_LEFT_TYPES = {torch.bfloat16: STORAGE_TYPES[torch.bfloat16]}

MAX_SETTLED_WIDTH = _MAX_PARTS * MIN_PART

_SPREADS = tuple(1 << bit for bit in range(MAX_SPREAD.bit_length()) if 1 << bit >= MIN_SPREAD)

_TYPES = {dtype: name for dtype, name in STORAGE_TYPES.items() if dtype.itemsize == 2}


class ScaledRows(NamedTuple):
    """A quantised matrix: row i is scales[i] * values[i], or was spread to that.

    Attributes:
        values: [n, width] of one of BYTE_TYPES, contiguous.
        scales: [n] float32.
        spread: columns of the blocks in which rows are spread before they are quantised; 0 for
            none. Both operands of a product are spread alike.
    """

    values: Tensor
    scales: Tensor
    spread: int = 0

    @property
    def spread_bits(self) -> int:
        """Log 2 of the columns of a block, as kernels take it; 0 if rows are not spread."""
        return self.spread.bit_length() - 1 if self.spread else 0

    @property
    def spreads(self) -> str:
        """The last template argument of a kernel that spreads rows as these; none if it does
        not."""
        return ", true" if self.spread else ""

    @classmethod
    def empty(
        cls,
        num_rows: int,
        width: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float8_e4m3fn,
        spread: int = 0,
    ) -> ScaledRows:
        """A matrix of zeros with values of this type."""
        values = torch.zeros(num_rows, width, dtype=torch.uint8, device=device).view(dtype)
        return cls(values, torch.zeros(num_rows, device=device), spread)

    def first(self, num_rows: int) -> ScaledRows:
        """The first rows."""
        return ScaledRows(self.values[:num_rows], self.scales[:num_rows], self.spread)

    def check(self, name: str, num_rows: int, width: int, *, may_be_spread: bool = False) -> str:
        """Check it as an operand of a kernel, which may not take spread ones; returns the C++ type
        of its values.

        Raises:
            ValueError: with the name of the operand, what it is and what is expected.
        """
        value_type = name_of(BYTE_TYPES, f"{name}.values", self.values)
        check(f"{name}.values", self.values, (num_rows, width), self.values.dtype)
        check(f"{name}.scales", self.scales, (num_rows,), torch.float32, vectors=False)
        if self.spread:
            self._check_spread(name, width, may_be_spread)
        return value_type

    def _check_spread(self, name: str, width: int, is_allowed: bool) -> None:
        if not is_allowed:
            raise ValueError(f"{name} is spread; this kernel takes rows as they are")
        if self.values.dtype != torch.int8:
            raise ValueError(f"{name} is spread; its values are {self.values.dtype}, allowed: int8")
        if self.spread not in _SPREADS or width % self.spread:
            raise ValueError(
                f"{name} is spread in blocks of {self.spread} of {width} columns; allowed: "
                f"{', '.join(map(str, _SPREADS))}, which divide them"
            )


def quantize_rows(x: Tensor, *, out: ScaledRows, pdl: bool = False) -> None:
    """Quantise each row, spread as `out` is, by its largest magnitude, which becomes the largest
    value.

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
    value_type = out.check("out", num_rows, width, may_be_spread=True)
    if not num_rows:
        return
    per_thread = next(
        count
        for count in _VECTORS_PER_THREAD
        if count >= fewest_vectors(num_rows) and vectors <= count * _MAX_THREADS
    )
    threads = -(-vectors // (32 * per_thread)) * 32
    kernel("quantization", _name(value_type, storage, per_thread, out.spreads))(
        num_rows,
        threads,
        x,
        out.values,
        out.scales,
        width,
        x.stride(0),
        out.spread_bits,
        pdl=pdl,
    )


def num_codes(num_rows: int, width: int) -> int:
    """Bytes of the scales' codes of so many rows, at most: see `settle_rows`."""
    return num_rows * -(-width // MIN_PART)


def settle_rows(rows: ScaledRows, codes: Tensor, part: int, *, pdl: bool = False) -> None:
    """Give each row one scale, where parts of it have scales of their own.

    These are coarse (eight_bit.cuh), so that most parts of a row have its largest one already.
    Values of others are divided by a power of 256, which rounds only those again that are subnormal
    numbers of e4m3 then: more than 112 times smaller than the row's largest value.

    Args:
        rows: [n, width] of e4m3, width at most MAX_SETTLED_WIDTH; updated in place, and its scales
            written. The scale of a row with NaN or infinity is NaN.
        codes: [n, parts] uint8, of the scales of each part (eight_bit.cuh).
        part: columns of a part, a multiple of 16 and at least MIN_PART.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    num_rows, width = check_parts(rows, part)
    check("codes", codes, (num_rows, -(-width // part)), torch.uint8, vectors=False)
    _settle(_SETTLING, (), rows, codes, part, pdl)


def settle_parts(
    left: Tensor, *, out: ScaledRows, codes: Tensor, part: int, pdl: bool = False
) -> None:
    """The same, where some parts are not quantised yet.

    Args:
        left: [n, width] bfloat16; of parts whose code is 0, what is quantised to `out`, at once
            with the row's scale.
        out: [n, width] of e4m3, as of `settle_rows`.
        codes: [n, parts] uint8, 0 for parts that are left; zeros thereafter.
        part: as of `settle_rows`; rows have whole parts.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    num_rows, width = check_parts(out, part)
    if width % part:
        raise ValueError(f"a row has {width} values; expected a multiple of {part}, whole parts")
    storage = name_of(_LEFT_TYPES, "left", left)
    check("left", left, (num_rows, width), left.dtype)
    check("codes", codes, (num_rows, width // part), torch.uint8, vectors=False)
    _settle(_parts_name(storage), (left,), out, codes, part, pdl)


def check_parts(rows: ScaledRows, part: int) -> tuple[int, int]:
    """Check rows of e4m3 whose parts have scales of their own; returns their number and width.

    Raises:
        ValueError: wrong shape, type or alignment, or parts that kernels do not settle.
    """
    num_rows, width = rows.values.shape
    if rows.check("rows", num_rows, width) != BYTE_TYPES[torch.float8_e4m3fn]:
        raise ValueError(f"rows.values is {rows.values.dtype}; expected {torch.float8_e4m3fn}")
    if width % 16 or width > MAX_SETTLED_WIDTH:
        raise ValueError(
            f"a row has {width} values; allowed: multiples of 16 up to {MAX_SETTLED_WIDTH}"
        )
    if part % 16 or part < MIN_PART:
        raise ValueError(f"part is {part}; allowed: multiples of 16 from {MIN_PART} on")
    return num_rows, width


def _settle(
    name: str, left: tuple[Tensor, ...], rows: ScaledRows, codes: Tensor, part: int, pdl: bool
) -> None:
    num_rows, width = rows.values.shape
    if not num_rows:
        return
    kernel("quantization", name)(
        -(-num_rows // _ROWS_AT_ONCE),
        32 * _ROWS_AT_ONCE,
        *left,
        rows.values,
        rows.scales,
        codes,
        num_rows,
        width,
        part,
        pdl=pdl,
    )


def _parts_name(storage: str) -> str:
    return f"settle_parts<{storage}>"


def _name(value_type: str, storage: str, per_thread: int, spreads: str) -> str:
    return f"quantize_rows<{value_type}, {storage}, {per_thread}{spreads}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = tuple(
        _name(value_type, storage, per_thread, spreads)
        for value_type, spreads in QUANTIZING_TYPES
        for storage in _TYPES.values()
        for per_thread in _VECTORS_PER_THREAD
    )
    left = (_parts_name(storage) for storage in _LEFT_TYPES.values())
    return [("quantization", (*names, _SETTLING, *left), ())]
