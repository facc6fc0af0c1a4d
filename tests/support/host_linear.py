"""The linear layers of a step as their torch definitions; see `host_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.layers.linear import CudaWeight
from inflight.models.linear.grouped_cuda import ValidTokens
from inflight.models.linear.scaled_cuda import QuantizedInputs
from inflight.models.linear.weight_only_cuda import DequantizedWeight
from inflight.models.quantization.matrix import QuantizedMatrix
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedRows
from inflight_kernels.ops.linear.operands import (
    MAX_SUMMED_ROWS,
    Input,
    NormedRows,
    SummedRows,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.torch_ops import quantization, transformer


class HostLinear:
    """Satisfies `CudaWeight`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> None:
        self.weight = weight
        self._bias = bias
        self._invariant = batch_invariant

    def input_rows(self, num_tokens: int) -> None:
        return None

    def coarse_rows(self, num_tokens: int) -> None:
        return None

    def norms(self, num_tokens: int) -> bool:
        return False

    def sums(self, num_tokens: int) -> bool:
        return not self._invariant and num_tokens <= MAX_SUMMED_ROWS // 2

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        if isinstance(x, NormedRows | SummedRows):
            x = _normed(x)
        assert isinstance(x, Tensor), "quantised inputs are for quantised weights"
        kind = out.dtype  # logits in float32 are not rounded on their way
        product = transformer.linear(x[:num_tokens].to(kind), self.weight.to(kind), self._bias)
        out[:num_tokens] = product

    def add(self, x: Tensor, total: Tensor, num_tokens: int) -> None:
        total[:num_tokens] += transformer.linear(x[:num_tokens], self.weight, self._bias)

    def gated(
        self, x: Tensor, gate_up: Tensor, out: Tensor, num_tokens: int, down: CudaWeight
    ) -> Tensor:
        both = transformer.linear(x[:num_tokens], self.weight, self._bias)
        out[:num_tokens] = transformer.silu_mul(both)
        return out


def _normed(x: NormedRows | SummedRows) -> Tensor:
    """The norm, after the sum is written where it belongs."""
    residual = x.residual if isinstance(x, SummedRows) else None
    normed, total = transformer.rms_norm(x.rows, x.weight, x.eps, residual)
    if isinstance(x, SummedRows):
        x.total.copy_(total)
    return normed


class HostScaledLinear:
    """Satisfies `CudaWeight`, of a quantised weight."""

    def __init__(
        self, weight: ScaledRows, bias: Tensor | None, inputs: QuantizedInputs, invariant: bool
    ) -> None:
        self.weight = weight
        self._bias = None if bias is None else bias.float()  # sums are in float32
        self._inputs = inputs
        self._invariant = invariant

    def input_rows(self, num_tokens: int) -> ScaledRows:
        return self._inputs.rows(num_tokens, self.weight)

    def coarse_rows(self, num_tokens: int) -> ScaledRows | None:
        takes = self.weight.values.dtype == torch.float8_e4m3fn and not self._invariant
        return self.input_rows(num_tokens) if takes else None

    def norms(self, num_tokens: int) -> bool:
        return False

    def sums(self, num_tokens: int) -> bool:
        return not self._invariant and num_tokens <= MAX_SUMMED_ROWS // 2

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        if isinstance(x, NormedRows | SummedRows):
            x = _normed(x)
        out[:num_tokens] = self._product(x, num_tokens)

    def add(self, x: Tensor | ScaledRows, total: Tensor, num_tokens: int) -> None:
        total[:num_tokens] += self._product(x, num_tokens)

    def gated(
        self,
        x: Tensor | ScaledRows,
        gate_up: Tensor,
        out: Tensor,
        num_tokens: int,
        down: CudaWeight,
    ) -> Tensor | ScaledRows:
        found = transformer.silu_mul(self._product(x, num_tokens))
        out[:num_tokens] = found
        dtype = self.weight.values.dtype
        if dtype != torch.float8_e4m3fn or not isinstance(down, HostScaledLinear):
            return out
        return ScaledRows(*quantization.quantize_rows(found, dtype))

    def _product(self, x: Tensor | ScaledRows, num_tokens: int) -> Tensor:
        values, scales, spread = self.weight
        if isinstance(x, Tensor):
            return quantization.quantized_linear(
                x[:num_tokens], values, scales, self._bias, spread=spread
            )
        assert x.spread == spread, "both are spread alike"
        wide = quantization.dequantize_rows(x.values, x.scales)
        weight = quantization.dequantize_rows(values, scales)
        return transformer.linear(wide, weight, self._bias)


class HostGroupedLinear(HostLinear):
    def __init__(
        self,
        weight: GroupedRows,
        bias: Tensor | None,
        dequantized: DequantizedWeight | None,
        batch_invariant: bool,
        valid_tokens: ValidTokens,
    ) -> None:
        super().__init__(grouped_rows.dequantized(weight), bias, batch_invariant)


class HostWeightOnlyLinear(HostLinear):
    """Of a quantised weight and x as it is."""

    def __init__(
        self,
        weight: QuantizedMatrix,
        bias: Tensor | None,
        memory: DequantizedWeight,
        batch_invariant: bool,
    ) -> None:
        assert memory.matrix(*weight.shape).shape == weight.shape
        super().__init__(weight.dequantized(), bias, batch_invariant)
