"""What a decoder asks of the weight of a linear layer. A weight owns its data, its format and its
device: each format is a module of `quantization`.

Shapes: T tokens that count, in buffers of more rows; weights [n, k] as checkpoints have them. On a
GPU whole buffers are taken, since where a token's numbers must not depend on the batch they are
computed in tiles of one size, rows that count and others.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

INVARIANT_ROWS = 128
"""Rows of such a tile. Buffers have a multiple of it."""


class CpuWeight(Protocol):
    """A weight on the CPU."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] @ weight.T + bias -> [T, n]."""


class CudaWeight(Protocol):
    """A weight on a GPU: the three products that a transformer has."""

    def product(self, x: Tensor, out: Tensor, num_tokens: int) -> None:
        """out = x @ weight.T + bias, out in float32 or in x's type."""

    def add(self, x: Tensor, total: Tensor, num_tokens: int) -> None:
        """total += x @ weight.T + bias"""

    def gated(self, x: Tensor, gate_up: Tensor, out: Tensor, num_tokens: int) -> None:
        """out = silu(gate) * up, where gate | up = x @ weight.T + bias; gate_up is scratch."""
