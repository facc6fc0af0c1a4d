"""Scales and minimums of groups of columns in records, as csrc/linear/grouped.cuh has them: numbers
in bfloat16, or integers of 8 bits times units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, COLUMNS = 16, 128
"""Of a record."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What scales and minimums are multiples of, by integers of 8 bits with a sign.

    Attributes:
        scales: [n, k / columns] float32, of so many columns of a row.
        minimums: as scales; None without minimums.
    """

    scales: Tensor
    minimums: Tensor | None

    def each(self, function: Callable[[Tensor], Tensor]) -> Units:
        """Of both."""
        minimums = None if self.minimums is None else function(self.minimums)
        return Units(function(self.scales), minimums)


@dataclass(frozen=True, slots=True, eq=False)
class Multiples:
    """Scales, and minimums if there are.

    Attributes:
        integers: of each, [n, k / group] int8.
        units: of each, [n, k / COLUMNS] float16.
    """

    integers: list[Tensor]
    units: list[Tensor]


def multiples(
    scales: Tensor, minimums: Tensor | None, units: Units, k: int, largest: float
) -> Multiples | None:
    """Scales, and minimums if there are, [n, k / group], as integers and units of records.

    Args:
        largest: scale that kernels take, and unit, also of integers that are all 0: infinity times
            0 would be no number.

    Returns:
        None if they are not multiples by such integers, or if float16 does not have the units.
    """
    pairs = [(scales, units.scales)]
    if minimums is not None:
        if units.minimums is None:
            return None
        pairs.append((minimums, units.minimums))
    sizes = [] if scales.is_meta else [float(one.abs().amax()) for one in pairs[0] if one.numel()]
    if any(size > largest for size in sizes):
        return None
    found = [_multiples(*pair, k) for pair in pairs]
    whole = [one for one in found if one is not None]
    if len(whole) < len(pairs):
        return None
    return Multiples([integers for integers, _ in whole], [of_records for _, of_records in whole])


def _multiples(numbers: Tensor, units: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    columns, group = k // units.shape[1], k // numbers.shape[1]
    if columns % COLUMNS or columns % group:
        return None
    narrow = units.to(torch.float16)
    of_records = narrow.repeat_interleave(columns // COLUMNS, 1)
    if numbers.is_meta:
        return numbers.to(torch.int8), of_records
    wide = units.repeat_interleave(columns // group, 1)
    integers = (numbers / wide).nan_to_num_(nan=0.0).round_().clamp_(-128, 127)
    # Products of such integers and numbers of float16 are exact.
    if not torch.equal(integers * wide, numbers) or not torch.equal(narrow.float(), units):
        return None
    return integers.to(torch.int8), of_records


def packed(parts: Sequence[Tensor], k: int, group: int) -> Tensor:
    """[tiles, chunks, bytes] of scales [n, groups], and of minimums if there are."""
    placed = []
    count = COLUMNS // group
    for factors in parts:
        n, given = factors.shape
        if given == 1:  # of all columns
            wide = factors.expand(n, -(-k // group))
        else:
            wide = factors.repeat_interleave(k // given // group, 1)
        padded = F.pad(wide, (0, -wide.shape[1] % count, 0, -n % ROWS))
        tiles, chunks = len(padded) // ROWS, padded.shape[1] // count
        split = padded.view(tiles, 2, 8, chunks, count)
        placed.append(split.permute(0, 3, 2, 4, 1))  # [tiles, chunks, 8, groups, halves]
    return torch.stack(placed, 4).reshape(*placed[0].shape[:2], -1).contiguous().view(torch.uint8)


def unpacked(raw: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `packed`, of so many parts: [count, rows, groups] float32."""
    tiles, chunks, _ = raw.shape
    # [tiles, chunks, 8, groups, scale or minimum, upper or lower]
    parts = raw.contiguous().view(dtype).view(tiles, chunks, 8, -1, count, 2)
    return parts.permute(4, 0, 5, 2, 1, 3).reshape(count, tiles * ROWS, -1).float()
