"""The residual stream of a model on a GPU.

Shapes: T valid tokens, in buffers with more rows. Calls of `norm` and `add` alternate, beginning
with `norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.layers.linear import CudaWeight
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.norm import rms_norm


class Residual:
    """A residual stream in the activations' dtype; linear layers accumulate into it directly.

    Args:
        num_rows, hidden_size: of the buffer.
        dtype: of the activations.
        device: the GPU.

    Attributes:
        hidden: [num_rows, hidden_size], complete after a norm.
    """

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.hidden = torch.zeros(num_rows, hidden_size, dtype=dtype, device=device)

    def begin(self, token_ids: Tensor, table: Tensor) -> None:
        """Initialise with the embeddings of tokens [T]."""
        embedding(token_ids, table, out=self.hidden[: len(token_ids)], pdl=True)

    def take(self, rows: Tensor, whole: Residual, num_tokens: int) -> None:
        """Initialise with rows [n] of another stream of T tokens, after a norm."""
        embedding(rows, whole.hidden[:num_tokens], out=self.hidden[: len(rows)], pdl=True)

    def norm(self, weight: Tensor, eps: float, out: Tensor) -> None:
        """RMSNorm of the first rows into out [T, hidden_size]."""
        rms_norm(self.hidden[: len(out)], weight, eps, out=out, pdl=True)

    def add(self, x: Tensor, linear: CudaWeight, num_tokens: int) -> None:
        """hidden += linear(x); x is an entire buffer."""
        linear.add(x, self.hidden, num_tokens)


class WideResidual(Residual):
    """A residual stream in float32: the norm kernel accumulates the output of the preceding
    linear layer, in the activations' dtype, into it.

    Args: as above.
    """

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_rows, hidden_size, torch.float32, device)
        self._addend = torch.zeros(num_rows, hidden_size, dtype=dtype, device=device)
        self._is_new = False  # `hidden` is not initialised yet

    def begin(self, token_ids: Tensor, table: Tensor) -> None:
        embedding(token_ids, table, out=self._addend[: len(token_ids)], pdl=True)
        self._is_new = True

    def norm(self, weight: Tensor, eps: float, out: Tensor) -> None:
        total = self.hidden[: len(out)]
        residual = None if self._is_new else total
        addend = self._addend[: len(out)]
        rms_norm(addend, weight, eps, residual, out=out, total=total, pdl=True)
        self._is_new = False

    def add(self, x: Tensor, linear: CudaWeight, num_tokens: int) -> None:
        linear.product(x, self._addend, num_tokens)
