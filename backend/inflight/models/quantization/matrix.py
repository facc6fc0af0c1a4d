"""Weight matrices as checkpoints have them, and what becomes of a fused layer's parts.

A matrix is [n, k] as in checkpoints, so a row is an output channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from inflight.config import Quantization
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.rounding import group_of, quantize_groups
from inflight_kernels.torch_ops.quantization import (
    dequantize_rows,
    quantize_rows,
    spread_block,
    spread_inputs,
    spread_weight,
)

DTYPES: dict[str, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Types of values, by the name of the format in settings."""

SPREAD_INT8: Quantization = "int8_hadamard"
"""As INT8, of weights and inputs that are spread first."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix of 8-bit values; the matrix itself is values * scales, row by row, or was spread to
    that.

    Attributes:
        values: [n, k] float8_e4m3fn or int8.
        scales: [n] float32.
        spread: columns of the blocks in which it was spread, as inputs of its products then are
            (`spread_weight`); 0 for none. Those of files never are.
    """

    values: Tensor
    scales: Tensor
    spread: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        """[n, k] float32, in the columns of before it was spread."""
        return spread_inputs(dequantize_rows(self.values, self.scales), self.spread)

    def split(self, rows: list[int]) -> list[QuantizedMatrix]:
        """Consecutive parts with so many rows each; views."""
        parts = zip(torch.split(self.values, rows), torch.split(self.scales, rows), strict=True)
        return [replace(self, values=values, scales=scales) for values, scales in parts]


Matrix: TypeAlias = Tensor | QuantizedMatrix | GroupedMatrix
"""A weight as a checkpoint has it: 16 or 32 bits a value, 8 bits and scales of rows, or codes and
scales of groups."""


M = TypeVar("M", Tensor, Matrix)


def stored_kind(matrix: Matrix) -> object:
    """What matrices have in common that are stored alike; None of those with 16 or 32 bits."""
    if isinstance(matrix, Tensor):
        return None
    if isinstance(matrix, QuantizedMatrix):
        return matrix.dtype, matrix.spread
    return matrix.kind


def row_parts(matrix: M, rows: list[int]) -> Sequence[M]:
    """Consecutive parts with so many rows each; views."""
    if isinstance(matrix, Tensor):
        return torch.split(matrix, rows)
    return matrix.split(rows)


def column_parts(matrix: Matrix, count: int) -> Sequence[Matrix]:
    """So many parts with equal numbers of consecutive columns; views, unless groups, or blocks of a
    spread matrix, have columns of several parts, which are dequantised."""
    width = matrix.shape[1] // count
    if isinstance(matrix, GroupedMatrix):
        if matrix.columns is None and width % matrix.group == 0:
            return matrix.column_parts(count)
        matrix = matrix.dequantized()
    if isinstance(matrix, QuantizedMatrix):
        if not matrix.spread or width % matrix.spread == 0:
            parts = torch.split(matrix.values, width, 1)
            return [replace(matrix, values=part) for part in parts]
        matrix = matrix.dequantized()
    return torch.split(matrix, width, 1)


def quantize(weight: Tensor, dtype: torch.dtype, spread: int = 0) -> QuantizedMatrix:
    """Quantise a weight [n, k] by rows (see `quantize_rows`); on the meta device, its shapes.

    Args:
        weight: of any float type.
        dtype: of the values, one of DTYPES.
        spread: columns of the blocks in which it is spread before; 0 for none.
    """
    if weight.is_meta:  # torch would import its compiler to compute there, which takes seconds
        scales = torch.empty(len(weight), device="meta")
        values = torch.empty(weight.shape, dtype=dtype, device="meta")
        return QuantizedMatrix(values, scales, spread)
    return QuantizedMatrix(*quantize_rows(spread_weight(weight, spread), dtype), spread)


def dequantized(matrix: Matrix) -> Tensor:
    """[n, k]: in float32 if it is quantised, otherwise the tensor itself."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantized()


def rounded(part: Matrix) -> Matrix:
    """A part of a linear layer in groups of 4 bits; itself if it has them, or if its width has no
    groups."""
    if isinstance(part, GroupedMatrix) and part.bits == 4:
        return part
    group = group_of(part.shape[1])
    return part if group is None else quantize_groups(dequantized(part), group)


def in_one_format(
    parts: Sequence[Matrix], quantization: Quantization, *, spreads: bool = False
) -> QuantizedMatrix | list[Tensor]:
    """The parts of a fused linear layer in the format in which it runs.

    Args:
        parts: one or more, of the same width.
        quantization: `none` and `int4` dequantise all of them (see `rounded`), `auto` those that
            differ in format or are in groups; others quantise those that are not quantised.
        spreads: whether inputs of the layer may be spread, so that SPREAD_INT8 spreads the parts
            before it quantises them. All have the same inputs, so none is spread if a part already
            has values of a file.

    Returns:
        All parts as one matrix with 8-bit values, concatenated along rows; or the parts, each in 16
        or 32 bits.
    """
    wanted = torch.int8 if quantization == SPREAD_INT8 else DTYPES.get(quantization)
    if wanted is not None:
        spreads &= quantization == SPREAD_INT8
        spreads &= not any(_has_dtype(part, wanted) for part in parts)
        spread = spread_block(parts[0].shape[1]) if spreads else 0
        parts = [
            part if _has_dtype(part, wanted) else quantize(dequantized(part), wanted, spread)
            for part in parts
        ]
    quantised = [part for part in parts if isinstance(part, QuantizedMatrix)]
    same = len(quantised) == len(parts) and len({stored_kind(part) for part in quantised}) == 1
    if quantization in ("none", "int4") or not same:
        return [dequantized(part) for part in parts]
    if len(quantised) == 1:
        return quantised[0]
    return QuantizedMatrix(
        torch.cat([part.values for part in quantised]),
        torch.cat([part.scales for part in quantised]),
        quantised[0].spread,
    )


def _has_dtype(part: Matrix, dtype: torch.dtype) -> bool:
    return isinstance(part, QuantizedMatrix) and part.dtype == dtype
