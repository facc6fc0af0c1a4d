"""Rounds weights to 4 bits, to the nearest code of each group of columns.

Nothing else is known of the model than its weights: calibrated formats (GPTQ, AWQ) are more exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix

_BITS, _LAST = 4, 15
_MIDDLE = 8
# Parts of a group's outermost values from which codes are tried.
_ENDS = (1.0, 0.9, 0.8)
# Values that are rounded at a time, with several copies of them: so few that they stay in a CPU's
# caches, or so many that a GPU's launches do not count.
_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 25}


def quantize_groups(weight: Tensor, group: int) -> GroupedMatrix:
    """Round a weight; on the meta device, its shapes.

    Codes 0 to 15 cover a group from near its least to near its largest value. That is more exact
    than steps of equal size about 0, which waste codes on a side with smaller values. How far the
    outermost values are cut off is tried for both sides; a scale and a minimum then follow from
    codes by least squares, and codes from them.

    Args:
        weight: [n, k] of any float type.
        group: columns of a group, a divisor of k.
    """
    n, k = weight.shape
    if weight.is_meta:  # torch would import its compiler to compute there, which takes seconds
        codes = torch.empty(weight.shape, dtype=torch.uint8, device="meta")
        scales, low = (torch.empty(n, k // group, device="meta") for _ in range(2))
        return GroupedMatrix(codes, _BITS, scales, low)
    found = [_best_of(part, _ENDS) for part in _groups(weight, group)]
    codes, scales, low = (torch.cat(parts) for parts in zip(*found, strict=True))
    return GroupedMatrix(codes.view(n, k), _BITS, scales, low)


def quantize_symmetrically(weight: Tensor, group: int) -> GroupedMatrix:
    """Round a weight with the code 8 for 0, as `pack-quantized` files of most engines.

    Args:
        weight: [n, k] of any float type; scales are numbers of that type.
        group: columns of a group, a divisor of k.
    """
    n, k = weight.shape
    grouped = weight.to(torch.float32).view(n, k // group, group)
    # Codes reach from -8 to 7: half a step beyond 7 is still rounded to it.
    scales = (grouped.abs().amax(2) / (_LAST / 2)).to(weight.dtype).to(torch.float32)
    steps = scales.masked_fill(scales == 0, 1.0)[:, :, None]
    codes = (grouped / steps).round_().clamp_(-_MIDDLE, _MIDDLE - 1).add_(_MIDDLE)
    return GroupedMatrix(codes.to(torch.uint8).view(n, k), _BITS, scales, zero=_MIDDLE)


def _groups(weight: Tensor, group: int) -> Iterator[Tensor]:
    """[rows, k / group, group] float32, some rows after the other."""
    n, k = weight.shape
    at_once = max(1, _AT_ONCE[weight.device.type] // k)
    for first in range(0, n, at_once):
        rows = weight[first : first + at_once].to(torch.float32)
        yield rows.view(len(rows), k // group, group)


def _best_of(values: Tensor, ends: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, groups, group] uint8, and scales and minimums [rows, groups], with the least
    mean square of errors; ends: of the least and the largest value, what the first try covers."""
    least, largest = values.amin(2), values.amax(2)
    best: list[Tensor] = []
    for low_end, high_end in itertools.product(ends, ends):
        low, high = low_end * least, high_end * largest
        codes = _codes(values, (high - low) / _LAST, low)
        scales, low = _fitted(values, codes, (high - low) / _LAST, low)
        codes = _codes(values, scales, low)
        errors = (codes * scales[:, :, None] + low[:, :, None] - values).square_().sum(2)
        found = [errors, codes.to(torch.uint8), scales, low]
        if best:
            is_better = errors < best[0]
            found = [
                torch.where(is_better if one.ndim == 2 else is_better[:, :, None], one, other)
                for one, other in zip(found, best, strict=True)
            ]
        best = found
    _, codes, scales, low = best
    return codes, scales, low


def _fitted(values: Tensor, codes: Tensor, scales: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums with the least squares of errors for these codes; those given where
    codes do not determine them."""
    count = values.shape[2]
    sum_codes, sum_values = codes.sum(2), values.sum(2)
    spread = count * codes.square().sum(2) - sum_codes.square()
    found = (count * (codes * values).sum(2) - sum_codes * sum_values) / spread.clamp(min=1.0)
    is_known = (spread > 0) & (found > 0)
    minimums = (sum_values - found * sum_codes) / count
    return torch.where(is_known, found, scales), torch.where(is_known, minimums, low)


def group_of(width: int) -> int | None:
    """Columns of a group of a matrix with so many; None if it keeps its 16 bits."""
    return next((group for group in (128, 64, 32) if width % group == 0), None)


def _codes(values: Tensor, scales: Tensor, low: Tensor) -> Tensor:
    """[rows, groups, group], as floats; 0 where all values are alike."""
    steps = scales.masked_fill(scales == 0, 1.0)[:, :, None]
    return ((values - low[:, :, None]) / steps).round_().clamp_(0, _LAST)
