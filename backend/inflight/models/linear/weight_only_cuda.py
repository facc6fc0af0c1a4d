"""Linear weights of 8 bits with a scale for each row, on a GPU; activations keep 16 (W8A16).

Shapes are those of `layers.linear`: T valid tokens, in buffers with more rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.layers.linear import CudaWeight
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight.models.quantization.matrix import QuantizedMatrix
from inflight_kernels.ops.linear import weight_only
from inflight_kernels.ops.linear.operands import Input
from inflight_kernels.ops.linear.scaled_rows import ScaledRows

_MAX_STREAMED_TOKENS = 2 * weight_only.MAX_TOKENS
"""Up to so many, the weight is read once for each 64 tokens. To dequantise it moves five times its
bytes: it is read, written with two bytes a value, and read again."""


class DequantizedWeight:
    """Memory for one weight in 16 bits at a time.

    Args:
        num_values: of the largest weight.
        dtype: of the values.
        device: the GPU.
    """

    def __init__(self, num_values: int, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.empty(num_values, dtype=dtype, device=device)

    def matrix(self, n: int, k: int) -> Tensor:
        """[n, k], overwritten by the next weight."""
        return self._values[: n * k].view(n, k)


class CudaWeightOnlyLinear:
    """A weight on a GPU of which the values have 8 bits, and x 16.

    Args:
        weight: [n, k], not spread; see `can_widen`.
        bias: [n], or None.
        dequantized: for at least n * k values; of x's type.
        batch_invariant: dequantise for any number of tokens, and multiply as `CudaLinear` does.
    """

    def __init__(
        self,
        weight: QuantizedMatrix,
        bias: Tensor | None,
        dequantized: DequantizedWeight,
        batch_invariant: bool,
    ) -> None:
        # The kernels refuse one that is spread, as x is not.
        self.weight = ScaledRows(weight.values, _nan_of_broken_rows(weight), weight.spread)
        self._bias = bias
        self._batch_invariant = batch_invariant
        self._wide = CudaLinear(
            dequantized.matrix(*weight.shape), bias, batch_invariant, is_constant=False
        )

    def input_rows(self, num_tokens: int) -> None:
        return None

    def coarse_rows(self, num_tokens: int) -> None:
        return None

    def norms(self, num_tokens: int) -> bool:
        return False

    def sums(self, num_tokens: int) -> bool:
        return False

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        if self._streams(num_tokens):
            self._stream(x, None, out[:num_tokens], gated=False)
        else:
            self._dequantized().product(x, out, num_tokens)

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        if self._streams(num_tokens):
            target = total[:num_tokens]
            self._stream(x, target, target, gated=False)
        else:
            self._dequantized().add(x, total, num_tokens)

    def gated(
        self, x: Input, gate_up: Tensor, out: Tensor, num_tokens: int, down: CudaWeight
    ) -> Tensor:
        if not self._streams(num_tokens):
            return self._dequantized().gated(x, gate_up, out, num_tokens, down)
        self._stream(x, None, out[:num_tokens], gated=True)
        return out

    def _streams(self, num_tokens: int) -> bool:
        return not self._batch_invariant and num_tokens <= _MAX_STREAMED_TOKENS

    def _stream(self, x: Input, residual: Tensor | None, out: Tensor, *, gated: bool) -> None:
        assert isinstance(x, Tensor), "quantised inputs are for products of 8 bits"
        for first in range(0, len(out), weight_only.MAX_TOKENS):
            rows = slice(first, min(first + weight_only.MAX_TOKENS, len(out)))
            weight_only.linear(
                x[rows],
                self.weight,
                self._bias,
                None if residual is None else residual[rows],
                out=out[rows],
                gated=gated,
                pdl=True,
            )

    def _dequantized(self) -> CudaLinear:
        weight_only.dequantize(self.weight, out=self._wide.weight)
        return self._wide


def can_widen(k: int) -> bool:
    """Whether there are kernels for a quantised weight [n, k]."""
    return k % 16 == 0


def _nan_of_broken_rows(weight: QuantizedMatrix) -> Tensor:
    """The scales, NaN for rows that contain NaN, since the kernels take it for a number."""
    values = weight.values
    if values.dtype != torch.float8_e4m3fn or values.is_meta:
        return weight.scales
    broken = (values.view(torch.uint8) & 0x7F).amax(1) == 0x7F
    return weight.scales.masked_fill(broken, torch.nan)
