"""Places weights in GPU memory. A module of its own: where there is no GPU, the kernels' compiler,
which it imports, need not be installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inflight.config import Quantization
from inflight.models.experts_cuda import CudaExperts, alternating
from inflight.models.gpu_support import shared_experts
from inflight.models.layers.linear import CudaWeight
from inflight.models.linear.expert_stack import ExpertStack, widened
from inflight.models.linear.grouped_cuda import CudaGroupedLinear, ValidTokens
from inflight.models.linear.grouped_records import joined_records
from inflight.models.linear.scaled_cuda import (
    CudaScaledLinear,
    QuantizedInputs,
    can_multiply,
)
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight.models.linear.weight_only_cuda import (
    CudaWeightOnlyLinear,
    DequantizedWeight,
    can_widen,
)
from inflight.models.loader import ExpertParts
from inflight.models.quantization.matrix import (
    Matrix,
    QuantizedMatrix,
    dequantized,
    in_one_format,
    rounded,
)
from inflight.models.spec import MoeSpec
from inflight_kernels.ops.linear.grouped_rows import RECORD_ROWS, GroupedRows
from inflight_kernels.ops.linear.operands import values_of
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe.products import ExpertsWeight


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
            also those of weights that are rounded, and whether experts keep them; None dequantises
            all at once.

    Attributes:
        valid_tokens: shared by linear layers that keep codes.
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
        self.valid_tokens = ValidTokens()

    def table(self, stored: Tensor) -> Tensor:
        return stored.to(self._device, self._dtype)

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        return stored.to(self._device, torch.float32, copy=True).add_(offset)

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> CudaWeight:
        bias = self._joined(biases) if biases else None
        num_rows, (_, width) = sum(part.shape[0] for part in weights), weights[0].shape
        memory = self._memory
        kept = self._records(weights)
        if kept is not None:
            return CudaGroupedLinear(
                kept, bias, self._groups, self._batch_invariant, self.valid_tokens
            )
        if isinstance(memory, QuantizedInputs) and can_multiply(num_rows, width):
            parts = self._quantized(weights, spreads=True)
            if isinstance(parts, QuantizedMatrix):
                rows = ScaledRows(parts.values, parts.scales, parts.spread)
                return CudaScaledLinear(rows, bias, memory, self._batch_invariant)
        elif isinstance(memory, DequantizedWeight) and can_widen(width):
            parts = self._quantized(weights, spreads=False)
            if isinstance(parts, QuantizedMatrix):
                return CudaWeightOnlyLinear(parts, bias, memory, self._batch_invariant)
        tensors = [dequantized(part) for part in weights]
        return CudaLinear(self._joined(tensors), bias, self._batch_invariant)

    def _records(
        self, weights: Sequence[Matrix], order: Tensor | None = None
    ) -> GroupedRows | None:
        """The parts of a layer, with rows in this order, if they stay in groups."""
        if self._groups is None:
            return None
        if self._quantization == "int4":
            weights = [rounded(_moved(part, self._device)) for part in weights]
        return joined_records(weights, self._device, order)

    def _quantized(
        self, weights: Sequence[Matrix], *, spreads: bool
    ) -> QuantizedMatrix | list[Tensor]:
        moved = [_moved(part, self._device) for part in weights]
        return in_one_format(moved, self._quantization, spreads=spreads)

    def experts(self, count: int, parts: Iterator[ExpertParts]) -> CudaExperts:
        gate_up, down = ExpertStack(count), ExpertStack(count)
        gate_up_bias, down_bias = ExpertStack(count), ExpertStack(count)
        for expert in parts:
            gate_up.append(self._expert_matrix(expert.gate_up, gate_up, alternates=True))
            down.append(self._expert_matrix(expert.down, down, alternates=False))
            if expert.gate_up_biases:
                gate_up_bias.append(alternating(self._joined(expert.gate_up_biases)))
                down_bias.append(self._joined(expert.down_biases))
        first, last = gate_up.whole, down.whole
        if _format(first) != _format(last):  # the kernels take one for both
            first, last = (widened(weight, count, self._dtype) for weight in (first, last))
        return CudaExperts(first, last, gate_up_bias.vectors, down_bias.vectors, count)

    def shared_experts(self, moe: MoeSpec) -> int:
        return shared_experts(moe)

    def _expert_matrix(
        self, weights: Sequence[Matrix], stack: ExpertStack, *, alternates: bool
    ) -> ExpertsWeight:
        """A layer of an expert, in the format of the experts before, which are dequantised if they
        are in groups and this one cannot be in the same."""
        grouped = self._grouped(weights, alternates) if stack.may_be_grouped else None
        if grouped is not None and stack.fits(grouped):
            return grouped
        stack.widen(self._dtype)
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

    def _grouped(self, weights: Sequence[Matrix], alternates: bool) -> GroupedRows | None:
        """A layer of an expert in groups; None if it has none, or cannot keep them."""
        num_rows = sum(part.shape[0] for part in weights)
        if num_rows % RECORD_ROWS:  # those of the next expert would begin within a record
            return None
        order = alternating(torch.arange(num_rows)) if alternates else None
        return self._records(weights, order)

    def router(self, stored: Tensor) -> Tensor:
        return self.norm(stored)

    def embedding(self, stored: Matrix) -> Tensor:
        return self.table(dequantized(stored))

    def tied(self, embedding: Tensor) -> CudaLinear:
        return CudaLinear(embedding, None, self._batch_invariant)

    def head(self, stored: Matrix) -> CudaWeight:
        is_kept = self._groups is not None and not self._batch_invariant
        kept = joined_records([stored], self._device) if is_kept else None
        if kept is not None:
            return CudaGroupedLinear(kept, None, None, False, self.valid_tokens)
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


def _format(weight: ExpertsWeight) -> object:
    """What experts' layers have in common that kernels take together."""
    return GroupedRows if isinstance(weight, GroupedRows) else values_of(weight).dtype


def _moved(part: Matrix, device: torch.device) -> Matrix:
    """On a device, where it is quantised much faster."""
    if isinstance(part, QuantizedMatrix):
        return replace(part, values=part.values.to(device), scales=part.scales.to(device))
    return part.to(device)
