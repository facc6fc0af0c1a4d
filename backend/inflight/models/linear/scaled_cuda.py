"""Linear weights of 8 bits, FP8 or INT8, with a scale for each row, on a Hopper GPU.

Activations are quantised to the same type, by the token. Shapes are those of `layers.linear`: T
valid tokens, in buffers with more rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.layers.linear import CudaWeight
from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.ops.linear.operands import Input, NormedRows, Operand, SummedRows
from inflight_kernels.ops.linear.scaled_rows import (
    MAX_WIDTH,
    ScaledRows,
    num_codes,
    quantize_rows,
)
from inflight_kernels.runtime.launch import is_hopper


class QuantizedInputs:
    """Memory for the quantised inputs of one linear layer at a time.

    Args:
        num_rows: maximum T.
        width: maximum k.
        device: the GPU.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self._values = torch.zeros(num_rows * width, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(num_rows, device=device)

    def rows(self, num_tokens: int, weight: ScaledRows) -> ScaledRows:
        """[num_tokens, k] for products with this weight [n, k]: of its type, and spread as it is;
        overwritten by the next caller."""
        dtype, width = weight.values.dtype, weight.values.shape[1]
        values = self._values[: num_tokens * width].view(dtype).view(num_tokens, width)
        return ScaledRows(values, self._scales[:num_tokens], weight.spread)


class CudaScaledLinear:
    """A quantised weight on a GPU.

    Args:
        weight: [n, k]; see `can_multiply`. Inputs are spread as it is.
        bias: [n] bfloat16, or None.
        inputs: for at least k columns.
        batch_invariant: use one kernel for any number of tokens; it adds up each token's products
            in the same order.
    """

    def __init__(
        self,
        weight: ScaledRows,
        bias: Tensor | None,
        inputs: QuantizedInputs,
        batch_invariant: bool,
    ) -> None:
        self.weight = weight
        self._bias = bias
        self._inputs = inputs
        self._batch_invariant = batch_invariant

    def input_rows(self, num_tokens: int) -> ScaledRows:
        return self._inputs.rows(num_tokens, self.weight)

    @property
    def takes_coarse(self) -> bool:
        """Whether its input may have coarse scales (eight_bit.cuh), with which some values are
        rounded twice. Integers have no room for them, and which values these are depends on the
        step."""
        return self.weight.values.dtype == torch.float8_e4m3fn and not self._batch_invariant

    def coarse_rows(self, num_tokens: int) -> ScaledRows | None:
        return self.input_rows(num_tokens) if self.takes_coarse else None

    def norms(self, num_tokens: int) -> bool:
        n, k = self.weight.values.shape
        return not self._batch_invariant and skinny_gemm.can_quantize(num_tokens, n, k)

    def sums(self, num_tokens: int) -> bool:
        return self.norms(num_tokens)

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        if isinstance(x, SummedRows):
            skinny_gemm.summing_linear(x, self.weight, self._bias, out=out[:num_tokens], pdl=True)
        else:
            self._multiply(x, None, out[:num_tokens], gated=False)

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        target = total[:num_tokens]
        self._multiply(x, target, target, gated=False)

    def gated(
        self, x: Input, gate_up: Tensor, out: Tensor, num_tokens: int, down: CudaWeight
    ) -> Operand:
        if not self._quantizes_gate(num_tokens, down):
            self._multiply(x, None, out[:num_tokens], gated=True)
            return out
        rows, codes = _gate_memory(gate_up, num_tokens, self.weight)
        gemm.quantizing_gate(
            self._quantized(x, num_tokens), self.weight, self._bias, out=rows, codes=codes, pdl=True
        )
        return rows

    def _quantizes_gate(self, num_tokens: int, down: CudaWeight) -> bool:
        """Whether results of the gate are quantised as `down` takes them."""
        return (
            isinstance(down, CudaScaledLinear)
            and down.takes_coarse
            and self.takes_coarse
            and num_tokens > skinny_gemm.MAX_TOKENS
            and gemm.can_quantize_gate(len(self.weight.values))
        )

    def _multiply(self, x: Input, residual: Tensor | None, out: Tensor, *, gated: bool) -> None:
        num_tokens = len(out)
        if isinstance(x, Tensor):
            x = x[:num_tokens]
        if not isinstance(x, ScaledRows) and self.norms(num_tokens):
            assert isinstance(x, Tensor | NormedRows), "sums are for products alone"
            skinny_gemm.quantizing_linear(
                x, self.weight, self._bias, residual, out=out, gated=gated, pdl=True
            )
            return
        few = num_tokens <= skinny_gemm.MAX_TOKENS and not self._batch_invariant
        linear = skinny_gemm.linear if few else gemm.linear
        rows = self._quantized(x, num_tokens)
        linear(rows, self.weight, self._bias, residual, out=out, gated=gated, pdl=True)

    def _quantized(self, x: Input, num_tokens: int) -> ScaledRows:
        """T rows of x, unless they are quantised already."""
        if isinstance(x, ScaledRows):
            return x
        assert isinstance(x, Tensor), "only few tokens are normed on the way"
        rows = self.input_rows(num_tokens)
        quantize_rows(x[:num_tokens], out=rows, pdl=True)
        return rows


def _gate_memory(gate_up: Tensor, num_tokens: int, weight: ScaledRows) -> tuple[ScaledRows, Tensor]:
    """Memory for `gemm.quantizing_gate` of T tokens, in that of gate | up in 16 bits."""
    memory = gate_up.view(-1).view(torch.uint8)
    width = len(weight.values) // 2
    sizes = [num_tokens * width, 4 * num_tokens, num_codes(num_tokens, width)]
    values, scales, codes = torch.split(memory[: sum(sizes)], sizes)
    rows = values.view(weight.values.dtype).view(num_tokens, width)
    return ScaledRows(rows, scales.view(torch.float32)), codes


def can_multiply(n: int, k: int) -> bool:
    """Whether the current device has kernels for a quantised weight [n, k]."""
    return n % 16 == 0 and k % 16 == 0 and k <= MAX_WIDTH and is_hopper()
