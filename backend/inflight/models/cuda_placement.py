"""Places weights in GPU memory. A module of its own: where there is no GPU, the kernels' compiler,
which it imports, need not be installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.config import Quantization
from inflight.models.layers.linear import CudaWeight
from inflight.models.quantization.matrix import (
    Matrix,
    QuantizedMatrix,
    dequantized,
    in_one_format,
)
from inflight.models.quantization.scaled_cuda import (
    CudaScaledLinear,
    QuantizedInputs,
    can_multiply,
)
from inflight.models.quantization.unquantized_cuda import CudaLinear
from inflight.models.quantization.weight_only_cuda import (
    CudaWeightOnlyLinear,
    DequantizedWeight,
    can_widen,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows


class CudaPlacement:
    """In GPU memory, row-major as stored.

    Args:
        dtype: of weights and activations.
        device: the GPU.
        batch_invariant: see `CudaLinear`.
        quantization: of linear layers, as in settings.
        memory: of linear layers with weights of 8 bits: for their inputs in 8 bits, or for a
            dequantised weight if inputs keep 16; None dequantises all weights at once.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        quantization: Quantization = "auto",
        memory: QuantizedInputs | DequantizedWeight | None = None,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._batch_invariant = batch_invariant
        self._quantization = quantization
        self._memory = memory

    def table(self, stored: Tensor) -> Tensor:
        return stored.to(self._device, self._dtype)

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        return stored.to(self._device, torch.float32, copy=True).add_(offset)

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> CudaWeight:
        bias = self._joined(biases) if biases else None
        num_rows, (_, width) = sum(part.shape[0] for part in weights), weights[0].shape
        memory = self._memory
        if isinstance(memory, QuantizedInputs) and can_multiply(num_rows, width):
            parts = self._quantized(weights)
            if isinstance(parts, QuantizedMatrix):
                rows = ScaledRows(parts.values, parts.scales)
                return CudaScaledLinear(rows, bias, memory, self._batch_invariant)
        elif isinstance(memory, DequantizedWeight) and can_widen(width):
            parts = self._quantized(weights)
            if isinstance(parts, QuantizedMatrix):
                return CudaWeightOnlyLinear(parts, bias, memory, self._batch_invariant)
        tensors = [dequantized(part) for part in weights]
        return CudaLinear(self._joined(tensors), bias, self._batch_invariant)

    def _quantized(self, weights: Sequence[Matrix]) -> QuantizedMatrix | list[Tensor]:
        moved = [_moved(part, self._device) for part in weights]
        return in_one_format(moved, self._quantization)

    def router(self, stored: Tensor) -> Tensor:
        return self.norm(stored)

    def tied(self, table: Tensor) -> CudaLinear:
        return CudaLinear(table, None, self._batch_invariant)

    def _joined(self, stored: Sequence[Tensor]) -> Tensor:
        if len(stored) == 1:
            return self.table(stored[0])
        rows = sum(len(part) for part in stored)
        whole = torch.empty((rows, *stored[0].shape[1:]), dtype=self._dtype, device=self._device)
        first = 0
        for part in stored:
            whole[first : first + len(part)].copy_(part)
            first += len(part)
        return whole


def _moved(part: Matrix, device: torch.device) -> Matrix:
    """On a device, where it is quantised much faster."""
    if isinstance(part, QuantizedMatrix):
        return QuantizedMatrix(part.values.to(device), part.scales.to(device))
    return part.to(device)
