"""Memory that detects out-of-bounds and missing writes of a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

_MARGIN = 256  # values before and after


class Guarded:
    """A contiguous tensor of NaN between margins of NaN.

    Attributes:
        tensor: for the kernel to fill.
    """

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        count = torch.Size(shape).numel()
        self._memory = torch.full((count + 2 * _MARGIN,), torch.nan, dtype=dtype, device="cuda")
        self.tensor = self._memory[_MARGIN : _MARGIN + count].view(shape)

    def check(self) -> Tensor:
        """The tensor, once all of it and none of the margins is written."""
        assert self._memory[:_MARGIN].isnan().all(), "values before the tensor were overwritten"
        assert self._memory[-_MARGIN:].isnan().all(), "values after the tensor were overwritten"
        assert not self.tensor.isnan().any(), "values of the tensor were left, or are NaN"
        return self.tensor


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||, in float64."""
    wanted = expected.double().cpu()
    return float((out.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-300))


ROUNDING = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-6}
"""Bounds of `relative_error` for float32 arithmetic and one rounding to the type. A value is off by
at most 2**-9, 2**-12 or so of itself, and by about half of that on average."""
