"""Weight-only matrices of 4 to 8 bits: codes with a scale for each group of columns.

The one form of all such formats, whatever file has them: AWQ, GPTQ, compressed-tensors, NF4, MXFP4,
NVFP4, GGUF. A placement packs it for its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from inflight_kernels.ops.linear.record_scales import Units


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
        units: if scales and minimums are integers times numbers of more columns, as in GGUF's K
            types.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    minimums: Tensor | None = None
    zero: int = 0
    levels: Tensor | None = None
    columns: Tensor | None = None
    units: Units | None = None

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
        return self._each(lambda part: part.index_select(0, index))

    def split(self, rows: list[int]) -> list[GroupedMatrix]:
        """Consecutive parts with so many rows each; views."""
        slices = [
            slice(end - count, end) for count, end in zip(rows, accumulate(rows), strict=True)
        ]
        return [self._each(partial(_at, at=one)) for one in slices]

    def column_parts(self, count: int) -> list[GroupedMatrix]:
        """So many parts with equal numbers of consecutive columns, which are whole groups of a
        matrix whose columns are in order; views."""
        whole = self
        if self.units is not None and self.units.scales.shape[1] % count:
            whole = replace(self, units=None)  # a part would begin within the columns of one
        return [whole._each(partial(_columns, part=part, count=count)) for part in range(count)]

    def to(self, device: torch.device) -> GroupedMatrix:
        """On a device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        found = self._each(lambda part: part.to(device))
        return replace(found, levels=moved(self.levels), columns=moved(self.columns))

    def _each(self, function: Callable[[Tensor], Tensor]) -> GroupedMatrix:
        """With a function of all tensors that have rows."""
        return replace(
            self,
            codes=function(self.codes),
            scales=function(self.scales),
            minimums=None if self.minimums is None else function(self.minimums),
            units=None if self.units is None else self.units.each(function),
        )


def _at(tensor: Tensor, at: slice) -> Tensor:
    return tensor[at]


def _columns(tensor: Tensor, part: int, count: int) -> Tensor:
    return torch.chunk(tensor, count, 1)[part]


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
        units = matrix.units and Units(matrix.units.scales, matrix.units.scales)
        return GroupedMatrix(matrix.codes, bits, factors, factors, units=units)
    scales, units = matrix.scales.repeat_interleave(times, 1), matrix.units
    if matrix.minimums is None:
        minimums = -matrix.zero * scales
        units = units and Units(units.scales, -matrix.zero * units.scales)
    else:
        minimums = matrix.minimums.repeat_interleave(times, 1) - matrix.zero * scales
        units = None if matrix.zero else units
    return GroupedMatrix(matrix.codes, bits, scales, minimums, units=units)


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
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minimums=torch.cat(minimums) if minimums else None,
        units=_concatenated_units([part.units for part in parts]),
    )


def _concatenated_units(parts: Sequence[Units | None]) -> Units | None:
    """None if a part has none, or if they are of different numbers of columns."""
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts) or len({part.scales.shape[1] for part in whole}) > 1:
        return None
    minimums = [part.minimums for part in whole if part.minimums is not None]
    scales = torch.cat([part.scales for part in whole])
    return Units(scales, torch.cat(minimums) if minimums else None)
