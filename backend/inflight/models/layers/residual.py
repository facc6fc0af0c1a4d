"""The residual stream of a model on a GPU.

Shapes: T valid tokens, in buffers with more rows. Calls of `norm` and `add` alternate, beginning
with `norm`; only sublayers in parallel add twice in a row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from inflight.models.layers.linear import CudaMixture, CudaSublayer
from inflight.models.layers.norm import NormWeights
from inflight.models.spec import ModelSpec
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.linear.operands import (
    MAX_SUMMED_ROWS,
    Input,
    NormedRows,
    Operand,
    SummedRows,
    values_of,
)
from inflight_kernels.ops.moe.sum_norm import ExpertRows, sum_rms_norm
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.ops.residual_norm import Addend, Affine, NormParams, add_norm

_MAX_WIDE_HIDDEN_SIZE = 2048
"""Up to this width the residual stream is kept in float32. A small model's logits are close
together, and rounding the stream changes them most: the error of SmolLM2's logits (hidden size 576)
has a standard deviation of 0.13 with this rounding and 0.08 without (emulated). Decode launches the
same number of kernels either way; prefill moves 6 bytes more per value of the stream, twice a
layer.
"""


class ResidualStream(Protocol):
    """A residual stream.

    Attributes:
        hidden: [num_rows, hidden_size], complete after a norm.
        quantizes: whether `norm` can quantise its output.
    """

    hidden: Tensor
    quantizes: bool

    def begin(self, token_ids: Tensor, table: Tensor) -> None:
        """Initialise with the embeddings of tokens [T]."""

    def take(self, rows: Tensor, whole: ResidualStream, num_tokens: int) -> None:
        """Initialise with rows [n] of another stream of T tokens, after a norm."""

    def norm(self, norm: NormWeights | None, out: Operand) -> None:
        """The norm of the first rows into out [T, hidden_size], which may be quantised if it
        `quantizes`; without a norm, these rows."""

    def normed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | None:
        """The norm of the first rows, to be computed by a linear layer, instead of `norm`; None if
        it is not of rows of `hidden` as they are."""

    def summed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | SummedRows | None:
        """The norm of up to MAX_SUMMED_ROWS rows, to be computed by a sublayer, which may have to
        add to `hidden` what was added last, instead of `norm`; None if that is not all."""

    def add(
        self,
        x: Input,
        linear: CudaSublayer,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        """hidden += scale * norm(linear(x)); x is an entire buffer.

        Args:
            x: input of the linear layer.
            linear: the sublayer's last one.
            num_tokens: T.
            norm: of the sublayer's output; None for none.
            scale: of what is added.
        """

    def add_mixture(
        self,
        x: Input,
        mixture: CudaMixture,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        """As `add`; the sums over experts may be left to the next norm."""

    def add_parallel(self, x: Operand, linear: CudaSublayer, num_tokens: int) -> None:
        """Add linear(x) to what the preceding `add` adds, before its scale."""


def residual_stream(
    spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device
) -> ResidualStream:
    """The kind of stream that a model needs, with buffers of so many rows."""
    plain = spec.norm == "rms" and spec.embedding_scale == 1.0
    for layer in spec.layers:
        plain &= layer.pre_norms and not layer.post_norms and not layer.parallel
        plain &= layer.residual_scale == 1.0
    if not plain:
        return NormedResidual(spec, num_rows, dtype, device)
    kind = WideResidual if spec.hidden_size <= _MAX_WIDE_HIDDEN_SIZE else Residual
    return kind(spec, num_rows, dtype, device)


class Residual:
    """A residual stream in the activations' dtype; linear layers accumulate into it directly. It
    takes RMSNorms of its rows alone.

    Args:
        spec: of the model.
        num_rows: of the buffer.
        dtype: of the activations.
        device: the GPU.
    """

    quantizes = True

    def __init__(
        self, spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._eps = spec.norm_eps
        self.hidden = torch.zeros(num_rows, spec.hidden_size, dtype=dtype, device=device)
        self._experts: ExpertRows | None = None  # to be added by the next norm

    def begin(self, token_ids: Tensor, table: Tensor) -> None:
        embedding(token_ids, table, out=self.hidden[: len(token_ids)], pdl=True)

    def take(self, rows: Tensor, whole: ResidualStream, num_tokens: int) -> None:
        embedding(rows, whole.hidden[:num_tokens], out=self.hidden[: len(rows)], pdl=True)

    def norm(self, norm: NormWeights | None, out: Operand) -> None:
        assert norm is not None
        rows = self.hidden[: len(values_of(out))]
        if not self._norm_experts(norm, rows, out):
            rms_norm(rows, norm.weight, self._eps, out=out, pdl=True)

    def _norm_experts(self, norm: NormWeights, total: Tensor, out: Operand) -> bool:
        """Add the experts that are left to a norm, if there are any, and norm the sum."""
        experts, self._experts = self._experts, None
        if experts is None:
            return False
        sum_rms_norm(experts, norm.weight, self._eps, total=total, out=out, pdl=True)
        return True

    def normed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | None:
        assert norm is not None
        if self._experts is not None:
            return None
        return NormedRows(self.hidden[:num_tokens], norm.weight, self._eps)

    def summed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | SummedRows | None:
        return self.normed(norm, num_tokens)

    def add(
        self,
        x: Input,
        linear: CudaSublayer,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        linear.add(x, self.hidden, num_tokens)

    def add_mixture(
        self,
        x: Input,
        mixture: CudaMixture,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        self._experts = mixture.unsummed(x, num_tokens)
        if self._experts is None:
            self.add(x, mixture, num_tokens, norm, scale)

    def add_parallel(self, x: Operand, linear: CudaSublayer, num_tokens: int) -> None:
        linear.add(x, self.hidden, num_tokens)


class WideResidual(Residual):
    """A residual stream in float32: the norm kernel accumulates the output of the preceding
    linear layer, in the activations' dtype, into it.

    Args: as above.
    """

    def __init__(
        self, spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, num_rows, torch.float32, device)
        self._addend = torch.zeros(num_rows, spec.hidden_size, dtype=dtype, device=device)
        self._is_new = False  # `hidden` is not initialised yet
        # `hidden`, and the memory of the next sum where it is not computed in place.
        self._whole = self.hidden
        few = min(num_rows, MAX_SUMMED_ROWS)
        self._few = torch.zeros(few, spec.hidden_size, dtype=torch.float32, device=device)

    def begin(self, token_ids: Tensor, table: Tensor) -> None:
        embedding(token_ids, table, out=self._addend[: len(token_ids)], pdl=True)
        self.hidden, self._is_new = self._whole, True

    def take(self, rows: Tensor, whole: ResidualStream, num_tokens: int) -> None:
        self.hidden = self._whole
        super().take(rows, whole, num_tokens)

    def norm(self, norm: NormWeights | None, out: Operand) -> None:
        assert norm is not None
        num_tokens = len(values_of(out))
        total = self.hidden[:num_tokens]
        if self._norm_experts(norm, total, out):
            return
        residual = None if self._is_new else total
        addend = self._addend[:num_tokens]
        rms_norm(addend, norm.weight, self._eps, residual, out=out, total=total, pdl=True)
        self._is_new = False

    def normed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | None:
        return None

    def summed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | SummedRows | None:
        assert norm is not None
        if self._is_new or self._experts is not None:
            return None
        before = self.hidden
        self.hidden = self._few if before is self._whole else self._whole
        return SummedRows(
            self._addend[:num_tokens],
            before[:num_tokens],
            self.hidden[:num_tokens],
            norm.weight,
            self._eps,
        )

    def add(
        self,
        x: Input,
        linear: CudaSublayer,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        linear.product(x, self._addend, num_tokens)

    def add_parallel(self, x: Operand, linear: CudaSublayer, num_tokens: int) -> None:
        linear.add(x, self._addend, num_tokens)


class NormedResidual(WideResidual):
    """A residual stream in float32 with norms of any kind, also of what is added, and scales.

    Args: as above.
    """

    quantizes = False

    def __init__(
        self, spec: ModelSpec, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, num_rows, dtype, device)
        self._params = NormParams(spec.norm_eps, centered=spec.norm == "layer")
        self._embedding_scale = spec.embedding_scale
        # Of the addend, when it is added.
        self._norm: NormWeights | None = None
        self._scale = 1.0

    def begin(self, token_ids: Tensor, table: Tensor) -> None:
        super().begin(token_ids, table)
        self._norm, self._scale = None, self._embedding_scale

    def norm(self, norm: NormWeights | None, out: Operand) -> None:
        assert isinstance(out, Tensor), "its norms are not quantised"
        addend = Addend(self._addend[: len(out)], _affine(self._norm), self._scale)
        total = self.hidden[: len(out)]
        add_norm(
            addend,
            total,
            self._params,
            out=out,
            norm=_affine(norm),
            is_new=self._is_new,
            pdl=True,
        )
        self._is_new = False

    def summed(self, norm: NormWeights | None, num_tokens: int) -> NormedRows | SummedRows | None:
        return None

    def add(
        self,
        x: Input,
        linear: CudaSublayer,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        super().add(x, linear, num_tokens)
        self._norm, self._scale = norm, scale

    def add_mixture(
        self,
        x: Input,
        mixture: CudaMixture,
        num_tokens: int,
        norm: NormWeights | None = None,
        scale: float = 1.0,
    ) -> None:
        self.add(x, mixture, num_tokens, norm, scale)


def _affine(norm: NormWeights | None) -> Affine | None:
    return None if norm is None else Affine(norm.weight, norm.bias)
