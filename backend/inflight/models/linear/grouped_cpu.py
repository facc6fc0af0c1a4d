"""Weight-only linear layers and embeddings on a CPU.

Weights stay in 4 or 8 bits, and products are those of float32 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix
from inflight_kernels.cpu_ops.grouped_linear import PackedMatrix, can_pack


class PackedPart:
    """A matrix, packed for the kernels.

    Args:
        matrix: [n, k]; not kept. See `is_supported`.

    Attributes:
        packed: it.
        columns: see `GroupedMatrix`.
    """

    def __init__(self, matrix: GroupedMatrix) -> None:
        self.packed = PackedMatrix(
            matrix.codes,
            matrix.bits,
            matrix.scales,
            matrix.minimums,
            matrix.zero,
            matrix.levels,
        )
        self.columns = matrix.columns


class CpuGroupedLinear:
    """A weight on the CPU, of one part or of several that differ in format.

    Args:
        parts: one below the other.
        bias: [n], or None.
    """

    def __init__(self, parts: Sequence[PackedPart], bias: Tensor | None) -> None:
        self._parts = list(parts)
        self._sizes = [part.packed.shape[0] for part in parts]
        only = self._parts[0]
        # The usual case, for which views would take as long as the products of small matrices.
        is_whole = len(self._parts) == 1 and only.columns is None
        self._whole = only.packed if is_whole else None
        self._width = sum(self._sizes)
        whole = None if bias is None else bias.to(torch.float32)
        self._biases: Sequence[Tensor | None] = [None] * len(self._parts)
        if whole is not None:
            self._biases = torch.split(whole, self._sizes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] -> [T, n]."""
        wide = x if x.dtype is torch.float32 else x.to(torch.float32)
        wide = wide.contiguous()
        out = torch.empty(x.shape[0], self._width)
        if self._whole is not None:
            self._whole.product(wide, self._biases[0], out)
            return out if x.dtype is torch.float32 else out.to(x.dtype)
        first = 0
        for part, bias, size in zip(self._parts, self._biases, self._sizes, strict=True):
            rows = wide if part.columns is None else wide.index_select(1, part.columns)
            part.packed.product(rows, bias, out[:, first : first + size])
            first += size
        return out if x.dtype is torch.float32 else out.to(x.dtype)


class CpuGroupedTable:
    """An embedding table on the CPU, of which rows are dequantised as they are looked up.

    Args:
        table: [vocab_size, hidden_size].
        dtype: of activations.
    """

    def __init__(self, table: PackedPart, dtype: torch.dtype) -> None:
        self._table = table
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Rows [T, hidden_size] for token_ids [T]."""
        return self._table.packed.rows(token_ids).to(self._dtype)

    def as_linear(self) -> CpuGroupedLinear:
        """The output layer with the same weight, which is kept once."""
        return CpuGroupedLinear([self._table], None)


def is_supported(matrix: GroupedMatrix) -> bool:
    """Whether there are kernels for a matrix."""
    return can_pack(matrix.shape[1], matrix.group)
