"""Linear weights of 8 bits on a CPU, with activations quantised per token (W8A8).

The semantics are those of a product of 8-bit values, computed in float32: few CPUs multiply 8-bit
values faster than torch multiplies floats, and none e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.quantization.matrix import QuantizedMatrix
from inflight_kernels.torch_ops import quantization as ops
from inflight_kernels.torch_ops.transformer import pack


class CpuQuantizedLinear:
    """A quantised weight on the CPU, packed for a GEMM in float32.

    Its values are kept in float32, so it takes 4 bytes a value, as an unquantised weight in
    float32 does.

    Args:
        weight: [n, k]; not kept. Inputs are spread as it is.
        bias: [n], or None.
    """

    def __init__(self, weight: QuantizedMatrix, bias: Tensor | None) -> None:
        self._dtype = weight.dtype
        self._spread = weight.spread
        self._values = pack(weight.values.to(torch.float32))
        # A copy: the weights must not depend on the mapped file.
        self._scales = weight.scales.clone()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] -> [T, n]."""
        return ops.quantized_linear(
            x, self._values, self._scales, self._bias, self._dtype, self._spread
        )
