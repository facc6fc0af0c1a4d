"""Linear layers on a GPU: our kernels where they are faster, cuBLAS elsewhere.

Shapes: T tokens that count, in buffers of more rows; weights [n, k] as checkpoints have them. Whole
buffers are taken, since where a token's numbers must not depend on the batch they are computed in
tiles of one size, rows that count and others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.ops import activation, gemm, skinny_gemm
from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.runtime.launch import num_multiprocessors

INVARIANT_ROWS = 128
"""Rows of such a tile. Buffers have a multiple of it."""


def kernels_of(
    weight_shape: tuple[int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    gated: bool,
    max_tokens: int,
    batch_invariant: bool,
) -> list[tuple[str, str]]:
    """Stem and name of the kernels of ours that `Linear` may launch for a weight.

    Args:
        weight_shape: n, k.
        dtype: of x and the weight.
        out_dtype: of the result.
        gated: whether the weight is gate | up.
        max_tokens: T at most.
        batch_invariant: see `Linear`.
    """
    found = activation.kernels_of(dtype) if gated else []
    if not batch_invariant:
        found += gemm.kernels_of(weight_shape, dtype, out_dtype, gated, max_tokens)
        if skinny_gemm.prefers(1, *weight_shape):
            found += skinny_gemm.kernels_of(
                weight_shape, dtype, out_dtype, gated, num_multiprocessors()
            )
    return found


class Linear:
    """The three kinds that a transformer has.

    Args:
        batch_invariant: one kernel, and tiles of one size, whatever the number of tokens.
    """

    def __init__(self, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, num_tokens: int
    ) -> None:
        """out = x @ weight.T + bias, out in float32 or in x's type."""
        widens = out.dtype != x.dtype
        n, k = weight.shape
        if self._uses_skinny_gemm(weight, num_tokens):
            taken, target = x[:num_tokens], out[:num_tokens]
            skinny_gemm.linear(taken, weight, bias, out=target, pdl=True)
        elif not self._batch_invariant and gemm.prefers(num_tokens, n, k, False, widens):
            gemm.linear(x[:num_tokens], weight, bias, out=out[:num_tokens], pdl=True)
        else:
            for rows in self._tiles(num_tokens):
                if widens:
                    torch.mm(x[rows], weight.t(), out_dtype=out.dtype, out=out[rows])
                elif bias is None:
                    torch.mm(x[rows], weight.t(), out=out[rows])
                else:
                    torch.addmm(bias, x[rows], weight.t(), out=out[rows])

    def add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, num_tokens: int
    ) -> None:
        """total += x @ weight.T + bias"""
        if self._uses_skinny_gemm(weight, num_tokens):
            target = total[:num_tokens]
            skinny_gemm.linear(x[:num_tokens], weight, bias, target, out=target, pdl=True)
            return
        for rows in self._tiles(num_tokens):
            total[rows].addmm_(x[rows], weight.t())
            if bias is not None:
                total[rows].add_(bias)

    def gated(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate_up: Tensor,
        out: Tensor,
        num_tokens: int,
    ) -> None:
        """out = silu(gate) * up, where gate | up = x @ weight.T + bias; gate_up is scratch."""
        n, k = weight.shape
        taken, target = x[:num_tokens], out[:num_tokens]
        if self._uses_skinny_gemm(weight, num_tokens):
            skinny_gemm.linear(taken, weight, bias, out=target, gated=True, pdl=True)
        elif not self._batch_invariant and gemm.prefers(num_tokens, n, k, True, False):
            gemm.linear(taken, weight, bias, out=target, gated=True, pdl=True)
        else:
            self.product(x, weight, bias, gate_up, num_tokens)
            silu_mul(gate_up[:num_tokens], out=target, pdl=True)

    def _uses_skinny_gemm(self, weight: Tensor, num_tokens: int) -> bool:
        """Whether the kernel for few tokens takes it."""
        n, k = weight.shape
        return not self._batch_invariant and skinny_gemm.prefers(num_tokens, n, k)

    def _tiles(self, num_tokens: int) -> list[slice]:
        if not self._batch_invariant:
            return [slice(0, num_tokens)]
        starts = range(0, num_tokens, INVARIANT_ROWS)
        return [slice(first, first + INVARIANT_ROWS) for first in starts]
