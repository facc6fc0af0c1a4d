"""Interfaces of a linear layer's weight. A weight owns its data, format and device; each format is
a module of `quantization`.

Shapes: T valid tokens, in buffers with more rows; weights [n, k] as in checkpoints. On a GPU the
methods take entire buffers because batch-invariant mode computes tiles of a fixed size, padding
rows included.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

INVARIANT_ROWS = 128
"""Rows of a batch-invariant tile. Buffers have a multiple of it."""


class CpuWeight(Protocol):
    """A weight on the CPU."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] @ weight.T + bias -> [T, n]."""


class CudaWeight(Protocol):
    """A weight on a GPU, with the three forms of a linear layer in a transformer."""

    def product(self, x: Tensor, out: Tensor, num_tokens: int) -> None:
        """out = x @ weight.T + bias, out in float32 or in x's dtype."""

    def add(self, x: Tensor, total: Tensor, num_tokens: int) -> None:
        """total += x @ weight.T + bias"""

    def gated(self, x: Tensor, gate_up: Tensor, out: Tensor, num_tokens: int) -> None:
        """out = silu(gate) * up, where gate | up = x @ weight.T + bias; gate_up is scratch."""
