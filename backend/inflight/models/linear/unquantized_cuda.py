"""Unquantised linear weights, 16 or 32 bits, on a GPU.

Shapes are those of `layers.linear`: T valid tokens, in buffers with more rows. Own kernels are used
where they are faster, otherwise cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.layers.linear import INVARIANT_ROWS, CudaWeight
from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.linear import few_gemm, gemm, skinny_gemm
from inflight_kernels.ops.linear.operands import Input, NormedRows, SummedRows


class CudaLinear:
    """A weight on a GPU.

    Args:
        weight: [n, k].
        bias: [n], or None.
        batch_invariant: use one kernel and one tile size for any number of tokens.
        is_constant: whether no kernel writes the weight. If one does, no product begins before it
            has ended.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        batch_invariant: bool,
        *,
        is_constant: bool = True,
    ) -> None:
        self.weight = weight
        self._bias = bias
        self._batch_invariant = batch_invariant
        self._is_constant = is_constant

    def input_rows(self, num_tokens: int) -> None:
        return None

    def coarse_rows(self, num_tokens: int) -> None:
        return None

    def norms(self, num_tokens: int) -> bool:
        return False

    def sums(self, num_tokens: int) -> bool:
        n, k = self.weight.shape
        is_supported = self.weight.dtype == torch.bfloat16 and few_gemm.can_norm(num_tokens, n, k)
        return is_supported and not self._batch_invariant

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        weight, bias = self.weight, self._bias
        if isinstance(x, NormedRows | SummedRows):
            few_gemm.norm_linear(x, weight, bias, out=out[:num_tokens], pdl=self._is_constant)
            return
        assert isinstance(x, Tensor), "quantised inputs are for quantised weights"
        widens = out.dtype != x.dtype
        n, k = weight.shape
        if self._uses_skinny_gemm(num_tokens):
            taken, target = x[:num_tokens], out[:num_tokens]
            skinny_gemm.linear(taken, weight, bias, out=target, pdl=self._is_constant)
        elif not self._batch_invariant and gemm.prefers(num_tokens, n, k, False, widens):
            taken, target = x[:num_tokens], out[:num_tokens]
            gemm.linear(taken, weight, bias, out=target, pdl=self._is_constant)
        else:
            for rows in self._tiles(x, num_tokens):
                if widens:
                    torch.mm(x[rows], weight.t(), out_dtype=out.dtype, out=out[rows])
                elif bias is None:
                    torch.mm(x[rows], weight.t(), out=out[rows])
                else:
                    torch.addmm(bias, x[rows], weight.t(), out=out[rows])

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        assert isinstance(x, Tensor), "quantised inputs are for quantised weights"
        weight, bias = self.weight, self._bias
        if self._uses_skinny_gemm(num_tokens):
            target = total[:num_tokens]
            taken, pdl = x[:num_tokens], self._is_constant
            skinny_gemm.linear(taken, weight, bias, target, out=target, pdl=pdl)
            return
        for rows in self._tiles(x, num_tokens):
            total[rows].addmm_(x[rows], weight.t())
            if bias is not None:
                total[rows].add_(bias)

    def gated(
        self, x: Input, gate_up: Tensor, out: Tensor, num_tokens: int, down: CudaWeight
    ) -> Tensor:
        assert isinstance(x, Tensor), "quantised inputs are for quantised weights"
        (n, k), pdl = self.weight.shape, self._is_constant
        taken, target = x[:num_tokens], out[:num_tokens]
        if self._uses_skinny_gemm(num_tokens):
            skinny_gemm.linear(taken, self.weight, self._bias, out=target, gated=True, pdl=pdl)
        elif not self._batch_invariant and gemm.prefers(num_tokens, n, k, True, False):
            gemm.linear(taken, self.weight, self._bias, out=target, gated=True, pdl=pdl)
        else:
            self.product(x, gate_up, num_tokens)
            silu_mul(gate_up[:num_tokens], out=target, pdl=True)
        return out

    def _uses_skinny_gemm(self, num_tokens: int) -> bool:
        n, k = self.weight.shape
        return not self._batch_invariant and skinny_gemm.prefers(num_tokens, n, k)

    def _tiles(self, x: Tensor, num_tokens: int) -> list[slice]:
        """Rows of x that cuBLAS multiplies at a time; none while launches are recorded."""
        if x.is_meta:
            return []
        if not self._batch_invariant:
            return [slice(0, num_tokens)]
        starts = range(0, num_tokens, INVARIANT_ROWS)
        return [slice(first, first + INVARIANT_ROWS) for first in starts]
