"""Linear weights of codes with scales of groups, on a GPU; activations are bfloat16.

Shapes are those of `layers.linear`: T valid tokens, in buffers with more rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from inflight.models.layers.linear import CudaWeight
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight.models.linear.weight_only_cuda import DequantizedWeight
from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.linear import grouped, grouped_gemm
from inflight_kernels.ops.linear.grouped_rows import RECORD_ROWS, GroupedRows
from inflight_kernels.ops.linear.operands import Input
from inflight_kernels.runtime.launch import is_hopper

_MAX_FEW_TOKENS = grouped.MAX_TOKENS
"""On Hopper, up to so many take the kernel for few tokens."""

_MAX_MULTIPLIED_TOKENS = 256
"""On Hopper, more are multiplied by the dequantised weight, whose writing they outweigh."""

_MAX_STREAMED_TOKENS = 4 * grouped.MAX_TOKENS
"""The same on other GPUs, where the weight is read once for each 8 tokens."""


@dataclass(slots=True)
class ValidTokens:
    """How many of a pass's first tokens are no padding. The layers of a model share it.

    Attributes:
        count: [1] int32 on the device, history_ready (see common.cuh), as T is once a step has
            begun; None if all tokens are computed.
    """

    count: Tensor | None = None


class CudaGroupedLinear:
    """A weight on a GPU that stays in codes.

    Args:
        weight: [n, k].
        bias: [n], or None.
        dequantized: for at least n * k values; None if products take the codes for any number of
            tokens.
        batch_invariant: dequantise for any number of tokens, and multiply as `CudaLinear` does.
        valid_tokens: of the pass that is launched; products of few tokens leave out the others.
    """

    def __init__(
        self,
        weight: GroupedRows,
        bias: Tensor | None,
        dequantized: DequantizedWeight | None,
        batch_invariant: bool,
        valid_tokens: ValidTokens,
    ) -> None:
        self.weight = weight
        self._valid_tokens = valid_tokens
        self._bias = bias
        self._wide: CudaLinear | None = None
        self._max_tokens: int | None = None
        if dequantized is not None:
            whole = dequantized.matrix(weight.n, weight.k)
            self._wide = CudaLinear(whole, bias, batch_invariant, is_constant=False)
            self._max_tokens = _MAX_MULTIPLIED_TOKENS if is_hopper() else _MAX_STREAMED_TOKENS
            if batch_invariant:
                self._max_tokens = 0

    def input_rows(self, num_tokens: int) -> None:
        return None

    def coarse_rows(self, num_tokens: int) -> None:
        return None

    def norms(self, num_tokens: int) -> bool:
        return False

    def sums(self, num_tokens: int) -> bool:
        return False

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        wide = self._dequantized(num_tokens)
        if wide is None:
            self._multiply(x, None, out[:num_tokens], gated=False)
        else:
            wide.product(x, out, num_tokens)

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        wide = self._dequantized(num_tokens)
        if wide is None:
            target = total[:num_tokens]
            self._multiply(x, target, target, gated=False)
        else:
            wide.add(x, total, num_tokens)

    def gated(
        self, x: Input, gate_up: Tensor, out: Tensor, num_tokens: int, down: CudaWeight
    ) -> Tensor:
        wide = self._dequantized(num_tokens)
        if wide is not None:
            return wide.gated(x, gate_up, out, num_tokens, down)
        if self.weight.n % (2 * RECORD_ROWS):
            self.product(x, gate_up, num_tokens)
            silu_mul(gate_up[:num_tokens], out=out[:num_tokens], pdl=True)
        else:
            self._multiply(x, None, out[:num_tokens], gated=True)
        return out

    def _dequantized(self, num_tokens: int) -> CudaLinear | None:
        """The weight in 16 bits, if so many tokens are multiplied by that."""
        if self._wide is None or self._max_tokens is None or num_tokens <= self._max_tokens:
            return None
        grouped.dequantize(self.weight, out=self._wide.weight)
        return self._wide

    def _multiply(self, x: Input, residual: Tensor | None, out: Tensor, *, gated: bool) -> None:
        assert isinstance(x, Tensor), "quantised inputs are for products of 8 bits"
        few = len(out) <= _MAX_FEW_TOKENS
        some = not few and is_hopper()
        linear: Callable[..., None] = grouped_gemm.linear if some else grouped.linear
        if few:
            linear = partial(linear, num_tokens=self._valid_tokens.count)
        step = _MAX_MULTIPLIED_TOKENS if some else grouped.MAX_TOKENS
        for first in range(0, len(out), step):
            rows = slice(first, min(first + step, len(out)))
            linear(
                x[rows],
                self.weight,
                self._bias,
                None if residual is None else residual[rows],
                out=out[rows],
                gated=gated,
                pdl=True,
            )
