"""Random matrices of codes with scales of groups, as kernels read them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight_kernels.ops.linear.grouped_rows import (
    E2M1,
    E2M1_VALUES,
    RECORD_COLUMNS,
    TABLE,
    GroupedKind,
    GroupedRows,
    pack,
)
from inflight_kernels.ops.linear.record_scales import Units


def random_rows(n: int, k: int, kind: GroupedKind, device: str = "cuda") -> GroupedRows:
    """A matrix [n, k] of one kind, whose groups differ in scale; k is a multiple of 16, or has one
    group."""
    if kind.units:
        return _random_in_units(n, k, kind, device)
    bits = kind.bits
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    count = k // kind.group if k % kind.group == 0 else 1
    scales = (torch.rand(n, count, device=device) + 0.5) * (2.0 ** (1 - bits) * k**-0.5)
    minimums = None
    if kind.minimums:
        minimums = torch.randn(n, count, device=device) * k**-0.5
    levels = None
    if kind.codes == E2M1:
        positive = torch.tensor(E2M1_VALUES, device=device)
        levels = torch.cat([positive, -positive])
    elif kind.codes == TABLE:
        levels = torch.linspace(-1, 1, 16, device=device) * 8
    zero = 0 if levels is not None or kind.minimums else 1 << bits - 1
    return pack(codes, bits, scales, minimums, zero, levels)


def _random_in_units(n: int, k: int, kind: GroupedKind, device: str) -> GroupedRows:
    """The same of scales in units. It is packed with whole records, whose groups past the last
    column have a scale of 0."""
    columns = -(-k // RECORD_COLUMNS) * RECORD_COLUMNS
    codes = torch.randint(0, 1 << kind.bits, (n, columns), dtype=torch.uint8, device=device)
    starts = torch.arange(0, columns, kind.group, device=device)

    def multiples(size: float) -> tuple[Tensor, Tensor]:
        units = torch.rand(n, columns // RECORD_COLUMNS, device=device) + 0.5
        units = (units * size / 64).half().float()
        integers = torch.randint(-128, 128, (n, len(starts)), device=device) * (starts < k)
        wide = units.repeat_interleave(RECORD_COLUMNS // kind.group, 1)
        return integers * wide, units

    scales, of_scales = multiples(2.0 ** (1 - kind.bits) * k**-0.5)
    minimums, of_minimums, zero = None, None, 1 << kind.bits - 1
    if kind.minimums:
        (minimums, of_minimums), zero = multiples(k**-0.5), 0
    found = pack(codes, kind.bits, scales, minimums, zero, units=Units(of_scales, of_minimums))
    assert found.kind == kind
    return replace(found, k=k)
