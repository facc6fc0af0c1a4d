"""Places weights in GPU memory. A module of its own: where there is no GPU, the kernels' compiler,
which it imports, need not be installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.models.quantization.matrix import Matrix, dequantized
from inflight.models.quantization.unquantized_cuda import CudaLinear


class CudaPlacement:
    """In GPU memory, row-major as stored.

    Args:
        dtype: of weights and activations.
        device: the GPU.
        batch_invariant: see `CudaLinear`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, batch_invariant: bool) -> None:
        self._dtype = dtype
        self._device = device
        self._batch_invariant = batch_invariant

    def table(self, stored: Tensor) -> Tensor:
        return stored.to(self._device, self._dtype)

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        return stored.to(self._device, torch.float32, copy=True).add_(offset)

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> CudaLinear:
        bias = self._joined(biases) if biases else None
        parts = [dequantized(part) for part in weights]
        return CudaLinear(self._joined(parts), bias, self._batch_invariant)

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
