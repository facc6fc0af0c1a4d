"""Interfaces of a linear layer's weight, and of an embedding. A weight owns its data, format and
device; each format is a module of `quantization`.

Shapes: T valid tokens, in buffers with more rows; weights [n, k] as in checkpoints. On a GPU the
methods take entire buffers because batch-invariant mode computes tiles of a fixed size, padding
rows included; an x that is quantised already has its T rows alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:  # where there is no GPU, what the kernels import need not be installed
    from inflight_kernels.ops.linear.operands import Input, Operand
    from inflight_kernels.ops.linear.scaled_rows import ScaledRows
    from inflight_kernels.ops.moe.sum_norm import ExpertRows

INVARIANT_ROWS = 128
"""Rows of a batch-invariant tile. Buffers have a multiple of it."""


class CpuWeight(Protocol):
    """A weight on the CPU."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] @ weight.T + bias -> [T, n]."""


class CpuEmbedding(Protocol):
    """An embedding table on the CPU."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Rows [T, hidden_size] for token_ids [T], in the dtype of activations."""


class CudaSublayer(Protocol):
    """What ends a sublayer on a GPU: from the norm of the residual stream, or what follows it, to
    what is added to the stream."""

    def input_rows(self, num_tokens: int) -> ScaledRows | None:
        """Memory for x, quantised as this weight multiplies it; None if it takes x as it is.

        It is overwritten by the next call, of any weight, and by products with x in 16 bits.
        """

    def norms(self, num_tokens: int) -> bool:
        """Whether it computes the norm of so many rows on the way, and so takes x as NormedRows."""

    def sums(self, num_tokens: int) -> bool:
        """Whether `product` computes the norm of so many rows, or of their sum with others, on the
        way, and so takes x as NormedRows or SummedRows."""

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        """out = layer(x), of a linear one x @ weight.T + bias; out in float32 or in x's dtype."""

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        """total += layer(x)"""


class CudaMixture(CudaSublayer, Protocol):
    """A mixture of experts on a GPU."""

    def unsummed(self, x: Input, num_tokens: int) -> ExpertRows | None:
        """layer(x), whose sums over experts the next norm computes, so that these are no kernel of
        their own; None, and nothing is computed, if they are none anyway."""


class CudaWeight(CudaSublayer, Protocol):
    """A weight on a GPU, with the three forms of a linear layer in a transformer."""

    def coarse_rows(self, num_tokens: int) -> ScaledRows | None:
        """Memory as of `input_rows`, if x may be quantised with coarse scales (eight_bit.cuh), by
        which some values are rounded twice; None if not."""

    def gated(
        self, x: Input, gate_up: Tensor, out: Tensor, num_tokens: int, down: CudaWeight
    ) -> Operand:
        """silu(gate) * up, where gate | up = x @ weight.T + bias, as the input of `down`: entirely
        in `out`, or in the memory of gate_up its T rows, quantised as `down` multiplies them.

        Args:
            x: as of `add`.
            gate_up: [rows, n], scratch.
            out: [rows, n / 2].
            num_tokens: T.
            down: the layer that takes it.
        """


def whole_tiles(num_rows: int) -> int:
    """Rows of a buffer for so many tokens: a multiple of INVARIANT_ROWS."""
    return -(-num_rows // INVARIANT_ROWS) * INVARIANT_ROWS
