"""Unquantised linear weights and embeddings, 16 or 32 bits, on a CPU."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.torch_ops import transformer as ops


class CpuTable:
    """An embedding table on the CPU.

    Args:
        table: [vocab_size, hidden_size].

    Attributes:
        table: as given.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Rows [T, hidden_size] for token_ids [T]."""
        return ops.embedding(token_ids, self.table)

    def as_linear(self) -> CpuLinear:
        """The output layer with the same weight."""
        return CpuLinear(self.table, None)


class CpuLinear:
    """A weight on the CPU, packed for its GEMM.

    Args:
        weight: [n, k]; not kept.
        bias: [n], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = ops.pack(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] -> [T, n]."""
        return ops.linear(x, self._weight, self._bias)
