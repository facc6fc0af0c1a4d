"""Linear weights of 8 bits, FP8 or INT8, with a scale for each row, on a Hopper GPU.

Activations are quantised to the same type, by the token. Shapes are those of `layers.linear`: T
valid tokens, in buffers with more rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.ops.linear.operands import Input, NormedRows, SummedRows
from inflight_kernels.ops.linear.scaled_rows import MAX_WIDTH, ScaledRows, quantize_rows
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

    def gated(self, x: Input, gate_up: Tensor, out: Tensor, num_tokens: int) -> None:
        self._multiply(x, None, out[:num_tokens], gated=True)

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
        if isinstance(x, Tensor):
            rows = self.input_rows(num_tokens)
            quantize_rows(x, out=rows, pdl=True)
        else:
            assert isinstance(x, ScaledRows), "only few tokens are normed on the way"
            rows = x
        few = num_tokens <= skinny_gemm.MAX_TOKENS and not self._batch_invariant
        linear = skinny_gemm.linear if few else gemm.linear
        linear(rows, self.weight, self._bias, residual, out=out, gated=gated, pdl=True)


def can_multiply(n: int, k: int) -> bool:
    """Whether the current device has kernels for a quantised weight [n, k]."""
    return n % 16 == 0 and k % 16 == 0 and k <= MAX_WIDTH and is_hopper()
