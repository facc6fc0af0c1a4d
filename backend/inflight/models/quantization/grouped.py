"""Weight-only matrices of 4 to 8 bits: codes with a scale for each group of columns.

The one form of all such formats, whatever file has them: AWQ, GPTQ, compressed-tensors, NF4, MXFP4,
NVFP4, GGUF. A placement packs it for its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMatrix:
    """A matrix [n, k] of codes; the matrix itself is (level(code) - zero) * scale + minimum.

    Attributes:
        codes: [n, k] uint8, one code each.
        bits: of a code: 4, 5, 6 or 8.
        scales: [n, k / group] float32, one for each group of columns of a row.
        minimums: as scales; None for 0.
        zero: the code that stands for 0 where there is no minimum.
        levels: [2 ** bits] float32, the values of codes; None if a code is its own value.
        columns: [k] int64, the column of the checkpoint's matrix that each column is, which is that
            of the input as well; None if they are in order. Every column occurs once.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    minimums: Tensor | None = None
    zero: int = 0
    levels: Tensor | None = None
    columns: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Columns with a scale in common."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """What matrices have in common that can be concatenated along rows."""
        levels = None if self.levels is None else tuple(self.levels.tolist())
        columns = None if self.columns is None else self.columns.numpy().tobytes()
        has_minimums = self.minimums is not None
        return self.bits, self.group, has_minimums, self.zero, levels, columns

    def dequantized(self) -> Tensor:
        """[n, k] float32, columns in the order of the checkpoint's."""
        if self.codes.is_meta:  # see `matrix.quantize`
            return torch.empty(self.shape, device="meta")
        if self.levels is None:
            values = self.codes.to(torch.float32)
        else:  # an index of 64 bits takes twice as long
            index = self.codes.reshape(-1).to(torch.int32)
            values = self.levels.index_select(0, index).view(self.shape)
        grouped = values.view(len(values), -1, self.group)
        if self.zero:
            grouped.sub_(self.zero)
        grouped.mul_(self.scales[:, :, None])
        if self.minimums is not None:
            grouped.add_(self.minimums[:, :, None])
        if self.columns is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.columns, values)

    def rows(self, index: Tensor) -> GroupedMatrix:
        """These rows [m], in this order."""
        minimums = None if self.minimums is None else self.minimums.index_select(0, index)
        codes, scales = self.codes.index_select(0, index), self.scales.index_select(0, index)
        return self._like(codes, scales, minimums)

    def split(self, rows: list[int]) -> list[GroupedMatrix]:
        """Consecutive parts with so many rows each; views."""
        minimums: Sequence[Tensor | None] = [None] * len(rows)
        if self.minimums is not None:
            minimums = torch.split(self.minimums, rows)
        parts = zip(
            torch.split(self.codes, rows), torch.split(self.scales, rows), minimums, strict=True
        )
        return [self._like(*part) for part in parts]

    def column_parts(self, count: int) -> list[GroupedMatrix]:
        """So many parts with equal numbers of consecutive columns, which are whole groups of a
        matrix whose columns are in order; views."""
        minimums: Sequence[Tensor | None] = [None] * count
        if self.minimums is not None:
            minimums = torch.chunk(self.minimums, count, 1)
        parts = zip(
            torch.chunk(self.codes, count, 1),
            torch.chunk(self.scales, count, 1),
            minimums,
            strict=True,
        )
        return [self._like(*part) for part in parts]

    def to(self, device: torch.device) -> GroupedMatrix:
        """On a device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return GroupedMatrix(
            self.codes.to(device),
            self.bits,
            self.scales.to(device),
            moved(self.minimums),
            self.zero,
            moved(self.levels),
            moved(self.columns),
        )

    def _like(self, codes: Tensor, scales: Tensor, minimums: Tensor | None) -> GroupedMatrix:
        return GroupedMatrix(
            codes, self.bits, scales, minimums, self.zero, self.levels, self.columns
        )


def in_one_kind(parts: Sequence[GroupedMatrix]) -> GroupedMatrix | None:
    """Matrices, one below the other, with the same values: with the most bits, the smallest groups
    and minimums, if these differ; None if there is no common form."""
    if len({part.kind for part in parts}) == 1:
        return concatenated(parts)
    if any(part.levels is not None or part.columns is not None for part in parts):
        return None
    bits, group = max(part.bits for part in parts), math.gcd(*(part.group for part in parts))
    return concatenated([_widened(part, bits, group) for part in parts])


def _widened(matrix: GroupedMatrix, bits: int, group: int) -> GroupedMatrix:
    """The same values with minimums instead of a zero."""
    times = matrix.group // group
    if matrix.codes.is_meta:  # see `matrix.quantize`
        factors = torch.empty(matrix.shape[0], matrix.shape[1] // group, device="meta")
        return GroupedMatrix(matrix.codes, bits, factors, factors)
    scales = matrix.scales.repeat_interleave(times, 1)
    if matrix.minimums is None:
        minimums = -matrix.zero * scales
    else:
        minimums = matrix.minimums.repeat_interleave(times, 1) - matrix.zero * scales
    return GroupedMatrix(matrix.codes, bits, scales, minimums)


def joined_kinds(parts: Sequence[GroupedMatrix]) -> list[GroupedMatrix]:
    """Matrices, one below the other: neighbours of one kind as one."""
    runs = groupby(parts, lambda part: part.kind)
    return [concatenated(list(run)) for _, run in runs]


def concatenated(parts: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """Matrices of one kind, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedMatrix(
        torch.cat([part.codes for part in parts]),
        first.bits,
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
        first.zero,
        first.levels,
        first.columns,
    )
