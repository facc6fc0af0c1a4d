"""Random matrices of codes with scales of groups, as kernels read them."""

from __future__ import annotations

import torch

from inflight_kernels.ops.linear.grouped_rows import (
    E2M1,
    E2M1_VALUES,
    TABLE,
    GroupedKind,
    GroupedRows,
    pack,
)


def random_rows(n: int, k: int, kind: GroupedKind, device: str = "cuda") -> GroupedRows:
    """A matrix [n, k] of one kind, whose groups differ in scale; k is a multiple of 16, or has one
    group."""
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
