"""Places weights in GPU memory. A module of its own: where there is no GPU, the kernels' compiler,
which it imports, need not be installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inflight.config import Quantization
from inflight.models.experts_cuda import CudaExperts, alternating
from inflight.models.gpu_support import shared_experts
from inflight.models.layers.linear import CudaWeight
from inflight.models.loader import ExpertParts
from inflight.models.quantization.grouped import GroupedMatrix, in_one_kind
from inflight.models.quantization.grouped_cuda import CudaGroupedLinear, packed
from inflight.models.quantization.grouped_cuda import is_supported as can_keep
from inflight.models.quantization.matrix import (
    Matrix,
    QuantizedMatrix,
    dequantized,
    in_one_format,
    rounded,
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
from inflight.models.spec import MoeSpec
from inflight_kernels.ops.linear.operands import Operand, values_of
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
        groups: for a dequantised weight of linear layers that keep codes with scales of groups,
            also those of weights that are rounded; None dequantises them at once.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        quantization: Quantization = "auto",
        memory: QuantizedInputs | DequantizedWeight | None = None,
        groups: DequantizedWeight | None = None,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._batch_invariant = batch_invariant
        self._quantization = quantization
        self._memory = memory
        self._groups = groups

    def table(self, stored: Tensor) -> Tensor:
        return stored.to(self._device, self._dtype)

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        return stored.to(self._device, torch.float32, copy=True).add_(offset)

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> CudaWeight:
        bias = self._joined(biases) if biases else None
        num_rows, (_, width) = sum(part.shape[0] for part in weights), weights[0].shape
        memory = self._memory
        kept = self._kept(weights)
        if kept is not None:
            return CudaGroupedLinear(packed(kept), bias, self._groups, self._batch_invariant)
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

    def _kept(self, weights: Sequence[Matrix]) -> GroupedMatrix | None:
        """The parts of a layer on the GPU if they stay in groups."""
        if self._groups is None:
            return None
        if self._quantization == "int4":
            weights = [rounded(_moved(part, self._device)) for part in weights]
        parts = [part for part in weights if isinstance(part, GroupedMatrix) and can_keep(part)]
        if len(parts) < len(weights):
            return None
        whole = in_one_kind([part.to(self._device) for part in parts])
        return whole if whole is not None and can_keep(whole) else None

    def _quantized(self, weights: Sequence[Matrix]) -> QuantizedMatrix | list[Tensor]:
        moved = [_moved(part, self._device) for part in weights]
        return in_one_format(moved, self._quantization)

    def experts(self, count: int, parts: Iterator[ExpertParts]) -> CudaExperts:
        gate_up, down = _Stack(count), _Stack(count)
        gate_up_bias, down_bias = _Stack(count), _Stack(count)
        for expert in parts:
            gate_up.append(self._expert_matrix(expert.gate_up, gate_up, alternates=True))
            down.append(self._expert_matrix(expert.down, down, alternates=False))
            if expert.gate_up_biases:
                gate_up_bias.append(alternating(self._joined(expert.gate_up_biases)))
                down_bias.append(self._joined(expert.down_biases))
        first, last = gate_up.whole, down.whole
        if _format(first) != _format(last):  # the kernels take one for both
            first, last = (self._in_16_bits(weight) for weight in (first, last))
        return CudaExperts(first, last, gate_up_bias.vectors, down_bias.vectors)

    def shared_experts(self, moe: MoeSpec) -> int:
        return shared_experts(moe)

    def _in_16_bits(self, weight: Operand) -> Tensor:
        """[E, n, k], expert by expert."""
        if not isinstance(weight, ScaledRows):
            return weight
        whole = torch.empty(weight.values.shape, dtype=self._dtype, device=self._device)
        scales = weight.scales.view(whole.shape[:2])
        for expert, target in enumerate(whole):
            matrix = QuantizedMatrix(weight.values[expert], scales[expert])
            target.copy_(matrix.dequantized())
        return whole

    def _expert_matrix(
        self, weights: Sequence[Matrix], stack: _Stack, *, alternates: bool
    ) -> Operand:
        """A layer of an expert, in the format of the experts before."""
        num_rows, (_, width) = sum(part.shape[0] for part in weights), weights[0].shape
        quantises = isinstance(self._memory, QuantizedInputs) and can_multiply(num_rows, width)
        if quantises and stack.format is not self._dtype:
            wanted = self._quantization if stack.format is None else _NAMES[stack.format]
            parts = in_one_format([_moved(part, self._device) for part in weights], wanted)
            if isinstance(parts, QuantizedMatrix):
                values, scales = parts.values, parts.scales
                if alternates:  # not every type of 8 bits can be reordered as such
                    values = alternating(values.view(torch.uint8)).view(values.dtype)
                    scales = alternating(scales)
                return ScaledRows(values, scales)
        whole = self._joined([dequantized(part) for part in weights])
        return alternating(whole) if alternates else whole

    def router(self, stored: Tensor) -> Tensor:
        return self.norm(stored)

    def embedding(self, stored: Matrix) -> Tensor:
        return self.table(dequantized(stored))

    def tied(self, embedding: Tensor) -> CudaLinear:
        return CudaLinear(embedding, None, self._batch_invariant)

    def head(self, stored: Matrix) -> CudaWeight:
        is_kept = self._groups is not None and not self._batch_invariant
        if is_kept and isinstance(stored, GroupedMatrix) and can_keep(stored):
            return CudaGroupedLinear(packed(stored.to(self._device)), None, None, False)
        return self.tied(self.embedding(stored))

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


_NAMES: dict[torch.dtype, Quantization] = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


class _Stack:
    """Equal tensors of so many experts, copied one by one into one tensor."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._length = 0
        self._whole: Operand | None = None

    @property
    def format(self) -> torch.dtype | None:
        """Of the values; None without any yet."""
        return None if self._whole is None else values_of(self._whole).dtype

    @property
    def whole(self) -> Operand:
        """[count, n, k], of quantised ones with scales [count * n]."""
        assert self._whole is not None, "a mixture has experts"
        return self._whole

    @property
    def vectors(self) -> Tensor | None:
        """[count, n]; None if nothing was appended."""
        return None if self._whole is None else values_of(self._whole)

    def append(self, part: Operand) -> None:
        """The next expert's."""
        values, index = values_of(part), self._length
        if self._whole is None:
            self._whole = values.new_empty(self._count, *values.shape)
            if isinstance(part, ScaledRows):
                scales = part.scales.new_empty(self._count * len(values))
                self._whole = ScaledRows(self._whole, scales)
        if isinstance(self._whole, ScaledRows) and isinstance(part, ScaledRows):
            self._whole.scales[index * len(values) :][: len(values)].copy_(part.scales)
        # Copies bytes: not every type of 8 bits has a copy of its own everywhere.
        _bytes(values_of(self._whole)[index]).copy_(_bytes(values))
        self._length += 1


def _format(weight: Operand) -> torch.dtype | None:
    """Type of 8-bit values; None if it is not quantised."""
    return weight.values.dtype if isinstance(weight, ScaledRows) else None


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8) if values.itemsize == 1 else values


def _moved(part: Matrix, device: torch.device) -> Matrix:
    """On a device, where it is quantised much faster."""
    if isinstance(part, QuantizedMatrix):
        return QuantizedMatrix(part.values.to(device), part.scales.to(device))
    return part.to(device)
