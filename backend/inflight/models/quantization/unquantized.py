"""Unquantised linear weights, 16 or 32 bits, on a CPU."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.torch_ops import transformer as ops


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
