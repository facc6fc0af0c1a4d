"""Weights of a layer's experts on a GPU, one behind the other.

Shapes: E experts, n rows of an expert's weight, k columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight.models.quantization.matrix import QuantizedMatrix
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedRows
from inflight_kernels.ops.linear.operands import values_of
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe.products import ExpertsWeight


class ExpertStack:
    """Equal tensors of so many experts, copied one by one into one tensor."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._length = 0
        self._whole: ExpertsWeight | None = None

    @property
    def format(self) -> torch.dtype | None:
        """Of the values; None without any yet."""
        whole = self._whole
        return None if whole is None or isinstance(whole, GroupedRows) else values_of(whole).dtype

    @property
    def whole(self) -> ExpertsWeight:
        """[E, n, k], of quantised ones with scales [E * n]; or in records."""
        assert self._whole is not None, "a mixture has experts"
        return self._whole

    @property
    def vectors(self) -> Tensor | None:
        """[E, n]; None if nothing was appended."""
        whole = self._whole
        assert whole is None or isinstance(whole, Tensor), "matrices alone are quantised"
        return whole

    @property
    def may_be_grouped(self) -> bool:
        """Whether the next one may be in records."""
        return self._whole is None or isinstance(self._whole, GroupedRows)

    def fits(self, part: GroupedRows) -> bool:
        """Whether these records may be the next ones."""
        whole = self._whole
        if whole is None:
            return True
        if not isinstance(whole, GroupedRows):
            return False
        if replace(whole.kind, units=False) != replace(part.kind, units=False):
            return False
        if whole.table is None or part.table is None or whole.table.is_meta:
            return True
        return torch.equal(whole.table, part.table)

    def widen(self, dtype: torch.dtype) -> None:
        """Dequantise what is in records."""
        if isinstance(self._whole, GroupedRows):
            self._whole = widened(self._whole, self._count, dtype)

    def append(self, part: ExpertsWeight) -> None:
        """The next expert's."""
        if isinstance(part, GroupedRows):
            self._append_records(part)
            return
        values, index = values_of(part), self._length
        if self._whole is None:
            self._whole = values.new_empty(self._count, *values.shape)
            if isinstance(part, ScaledRows):
                scales = part.scales.new_empty(self._count * len(values))
                self._whole = ScaledRows(self._whole, scales)
        assert isinstance(self._whole, Tensor | ScaledRows), "as `widen` sees to"
        if isinstance(self._whole, ScaledRows) and isinstance(part, ScaledRows):
            self._whole.scales[index * len(values) :][: len(values)].copy_(part.scales)
        # Copies bytes: not every type of 8 bits has a copy of its own everywhere.
        _bytes(values_of(self._whole)[index]).copy_(_bytes(values))
        self._length += 1

    def _append_records(self, part: GroupedRows) -> None:
        if self._whole is None:
            device = part.records.device
            self._whole = grouped_rows.empty(
                self._count, part.n, part.k, part.kind, device, part.table
            )
        assert isinstance(self._whole, GroupedRows), "as the experts before"
        if self._whole.kind != part.kind:
            self._whole, part = (grouped_rows.without_units(one) for one in (self._whole, part))
        tiles = len(part.records)
        self._whole.records[self._length * tiles :][:tiles].copy_(part.records)
        self._length += 1


def widened(weight: ExpertsWeight, count: int, dtype: torch.dtype) -> Tensor:
    """Weights of so many experts dequantised, expert by expert: [E, n, k]."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, GroupedRows):
        shape = count, weight.n // count, weight.k
        whole = torch.empty(shape, dtype=dtype, device=weight.records.device)
        for target, expert in zip(whole, weight.matrices(count), strict=True):
            if not whole.is_meta:  # see `matrix.quantize`
                target.copy_(grouped_rows.dequantized(expert))
        return whole
    whole = torch.empty(weight.values.shape, dtype=dtype, device=weight.values.device)
    scales = weight.scales.view(whole.shape[:2])
    for index, target in enumerate(whole):
        target.copy_(QuantizedMatrix(weight.values[index], scales[index]).dequantized())
    return whole


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8) if values.itemsize == 1 else values
