"""A mixture of experts on a GPU.

Shapes: T valid tokens, in buffers with more rows; E experts, k experts per token, d columns of the
residual stream, w of an expert's inner layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.models.layers.linear import CudaWeight
from inflight.models.layers.routing import routing_of
from inflight.models.layers.weights import MoeWeights
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight.models.spec import Activation, MoeSpec
from inflight_kernels.ops.linear.grouped_rows import GroupedKind, GroupedRows
from inflight_kernels.ops.linear.operands import Input, NormedRows, Operand, SummedRows
from inflight_kernels.ops.linear.scaled_rows import ScaledRows, quantize_rows
from inflight_kernels.ops.moe import few, few_sizes, products, routing, rows
from inflight_kernels.ops.moe.sum_norm import ExpertRows

GATES: dict[Activation, int] = {"silu": products.SILU, "clamped_swiglu": products.CLAMPED}
"""Gates of experts that products compute."""

_MAX_ROUTER_PARTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class CudaExperts:
    """Weights of all experts of a layer, as `products.product` takes them.

    Attributes:
        gate_up: [E, 2 * w, d], rows of gate and up by turns.
        down: [E, d, w].
        gate_up_bias, down_bias: [E, 2 * w] and [E, d]; None without biases.
        count: E; shared ones, behind the others, included.
    """

    gate_up: products.ExpertsWeight
    down: products.ExpertsWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    count: int

    @property
    def values(self) -> products.WeightType:
        """Type of the weights; those of `down` have the same, or are in records as well."""
        return products.type_of(self.gate_up)

    @property
    def input_dtype(self) -> torch.dtype:
        """Of the rows that they are multiplied with."""
        return products.input_type(self.values)


def router_parts(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A router's weight [n, d] in float32 as a sum of matrices in `dtype`, one below the other.

    A weight that was stored in bfloat16 is one of them, and three have all 24 bits of float32. A
    product of bfloat16 with each, in float32, is as exact as one with the weight.

    Returns:
        [parts * n, d].
    """
    parts = [weight.to(dtype)]
    if weight.is_meta:
        return parts[0]
    rest = weight - parts[0].float()
    while len(parts) < _MAX_ROUTER_PARTS and rest.any():
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def alternating(gate_up: Tensor) -> Tensor:
    """Rows of gate above those of up [2 * w, ...] -> by turns, as `products.product` takes them."""
    count = len(gate_up) // (2 * products.GATE_ROWS)
    parts = gate_up.view(2, count, products.GATE_ROWS, *gate_up.shape[1:])
    return parts.transpose(0, 1).reshape(gate_up.shape)


def _kind(weight: products.ExpertsWeight) -> GroupedKind | None:
    return weight.kind if isinstance(weight, GroupedRows) else None


class MoeMemory:
    """Memory of the mixtures of experts of one model, shared by its layers.

    Args:
        moe_spec: of its layers.
        hidden_size: d.
        num_rows: maximum T.
        dtype: of activations.
        inputs: of the rows that experts' weights are multiplied with.
        device: the GPU.
        num_shared: experts behind the others as which the shared one is kept.
    """

    def __init__(
        self,
        moe_spec: MoeSpec,
        hidden_size: int,
        num_rows: int,
        dtype: torch.dtype,
        inputs: torch.dtype,
        device: torch.device,
        num_shared: int = 0,
    ) -> None:
        width, top_k = moe_spec.expert.width, moe_spec.top_k + num_shared
        num_experts = moe_spec.num_experts + num_shared

        def buffer(count: int, columns: int) -> Tensor:
            return torch.zeros(count, columns, dtype=dtype, device=device)

        columns = _MAX_ROUTER_PARTS * (moe_spec.num_experts + moe_spec.shared_gate)
        self._logits = torch.zeros(num_rows * columns, device=device)
        self.routed = routing.Routed(num_rows, num_experts, top_k, device)
        self.inner = buffer(num_rows * top_k, width)
        # Rows of x by expert, then those of the experts' outputs.
        self.outer = buffer(num_rows * top_k, hidden_size)
        self.gathered: Operand = self.outer
        self.inner_quantized: ScaledRows | None = None
        if inputs.itemsize == 1:
            self.gathered = ScaledRows.empty(num_rows * top_k, hidden_size, device, inputs)
            self.inner_quantized = ScaledRows.empty(num_rows * top_k, width, device, inputs)
        # Of few tokens: the norm that experts take.
        self.normed = buffer(few_sizes.MAX_TOKENS, hidden_size)
        self.choice = few.new_choice(device)
        self.few_rows: ScaledRows | None = None
        if inputs.itemsize == 1:
            self.few_rows = ScaledRows.empty(few_sizes.MAX_TOKENS, hidden_size, device, inputs)
        shared = None if num_shared else moe_spec.shared
        self.shared_gate_up = buffer(num_rows if shared else 0, 2 * shared.width if shared else 0)
        self.shared_gated = buffer(num_rows if shared else 0, shared.width if shared else 0)
        self.shared = buffer(num_rows if shared else 0, hidden_size)
        self._num_rows = num_rows

    def logits(self, columns: int) -> Tensor:
        """[num_rows, columns] float32."""
        return self._logits[: self._num_rows * columns].view(self._num_rows, columns)


class CudaMoe:
    """A mixture of experts, which satisfies `CudaMixture`: from the norm of the residual
    stream to what is added to it.

    Args:
        moe_spec: of the layer.
        weights: of the layer.
        memory: for the layer's experts and tokens.
        batch_invariant: see `CudaLinear`.

    Attributes:
        routed: of the step, shared with other layers.
    """

    def __init__(
        self,
        moe_spec: MoeSpec,
        weights: MoeWeights[CudaWeight, CudaExperts],
        memory: MoeMemory,
        batch_invariant: bool,
    ) -> None:
        router, gate = weights.router, weights.shared_gate
        scored = router if gate is None else torch.cat([router, gate])
        parts = router_parts(scored, memory.outer.dtype)
        self._scores = CudaLinear(parts, None, batch_invariant)
        self._router = routing.Router(
            routing_of(moe_spec),
            moe_spec.num_experts,
            len(parts) // len(scored),
            weights.router_bias,
            weights.select_bias,
            gate is not None,
            weights.experts.count - moe_spec.num_experts,
        )
        self._gate = GATES[moe_spec.expert.activation]
        self._experts = weights.experts
        experts = weights.experts
        self._gate_up = few.GateUp(experts.gate_up, experts.gate_up_bias, self._gate)
        self._down = few.Down(experts.down, experts.down_bias)
        self._shared = weights.shared
        self._memory = memory
        self._batch_invariant = batch_invariant
        # Layers of two kinds of codes: of both.
        self._sizes = [
            few_sizes.Sizes(
                memory.outer.shape[1],
                moe_spec.expert.width,
                moe_spec.num_experts,
                self._router.all_top_k,
                moe_spec.num_groups,
                experts.input_dtype.itemsize,
                kind,
            )
            for kind in dict.fromkeys(_kind(one) for one in (experts.gate_up, experts.down))
        ]
        self.routed = memory.routed

    def input_rows(self, num_tokens: int) -> None:
        return None

    def norms(self, num_tokens: int) -> bool:
        return not self._batch_invariant and all(one.fits(num_tokens) for one in self._sizes)

    def sums(self, num_tokens: int) -> bool:
        return self.norms(num_tokens)

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        self._run(x, out[:num_tokens], adds=False)

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        self._run(x, total[:num_tokens], adds=True)

    def unsummed(self, x: Input, num_tokens: int) -> ExpertRows | None:
        return None if self.norms(num_tokens) else self._run_many(_buffer(x), num_tokens)

    def _run(self, x: Input, total: Tensor, *, adds: bool) -> None:
        if isinstance(x, NormedRows | SummedRows):
            self._run_few(x, total, adds)
            return
        x, memory, num_tokens = _buffer(x), self._memory, len(total)
        if not self.norms(num_tokens):
            found = self._run_many(x, num_tokens)
            rows.sum_of_experts(*found, total=total, adds=adds, pdl=True)
            return
        logits = self._score(x, num_tokens)
        taken: Operand = x[:num_tokens]
        if memory.few_rows is not None:
            taken = memory.few_rows.first(num_tokens)
            quantize_rows(x[:num_tokens], out=taken, pdl=True)
        self._few_gate_up(taken, logits)
        self._few_down(x, total, adds)

    def _score(self, x: Tensor, num_tokens: int) -> Tensor:
        """The router's logits, of rows in an entire buffer."""
        logits = self._memory.logits(self._router.columns)
        self._scores.product(x, logits, num_tokens)
        return logits[:num_tokens]

    def _run_few(self, x: NormedRows | SummedRows, total: Tensor, adds: bool) -> None:
        """The norm, and the experts of few tokens."""
        memory, num_tokens, columns = self._memory, len(total), self._router.columns
        router, normed, quantized = self._scores.weight, memory.normed, memory.few_rows
        logits = memory.logits(columns)[:num_tokens]
        few.score(x, router, logits=logits, out=normed, quantized=quantized, pdl=True)
        self._few_gate_up(
            normed[:num_tokens] if quantized is None else quantized.first(num_tokens), logits
        )
        self._few_down(normed, total, adds)

    def _few_gate_up(self, x: Operand, logits: Tensor) -> None:
        memory = self._memory
        choice, inner = memory.choice, memory.inner
        few.gate_up(x, logits, self._router, self._gate_up, choice=choice, out=inner, pdl=True)

    def _few_down(self, x: Tensor, total: Tensor, adds: bool) -> None:
        """The rest after gate and up; x is that of the shared expert."""
        memory = self._memory
        few.down(
            memory.inner,
            memory.choice,
            self._router,
            self._down,
            self._run_shared(x, len(total)),
            total=total,
            adds=adds,
            pdl=True,
        )

    def _run_many(self, x: Tensor, num_tokens: int) -> ExpertRows:
        """The experts of any number of tokens; x is an entire buffer."""
        logits = self._score(x, num_tokens)
        shared = self._run_shared(x, num_tokens)
        memory, experts = self._memory, self._experts
        routed = memory.routed
        tile = products.tile_of(num_tokens, routed.num_experts, routed.top_k, experts.values)
        routing.route(logits, self._router, routed, tile=tile, pdl=True)
        taken: Operand = x[:num_tokens]
        if num_tokens > 1 or isinstance(memory.gathered, ScaledRows):
            rows.gather(x, routed, num_tokens=num_tokens, out=memory.gathered, pdl=True)
            taken = memory.gathered

        def multiply(
            rows_of: Operand,
            weight: products.ExpertsWeight,
            bias: Tensor | None,
            out: Tensor,
            gate: int,
        ) -> None:
            products.product(
                rows_of, weight, bias, routed, num_tokens=num_tokens, out=out, gate=gate, pdl=True
            )

        multiply(taken, experts.gate_up, experts.gate_up_bias, memory.inner, self._gate)
        inner: Operand = memory.inner
        if memory.inner_quantized is not None:
            num_rows = num_tokens * routed.top_k
            inner = memory.inner_quantized.first(num_rows)
            quantize_rows(memory.inner[:num_rows], out=inner, pdl=True)
        multiply(inner, experts.down, experts.down_bias, memory.outer, products.PLAIN)
        return ExpertRows(memory.outer, routed, shared)

    def _run_shared(self, x: Tensor, num_tokens: int) -> Tensor | None:
        """[T, d] of the shared expert."""
        if self._shared is None:
            return None
        memory, down = self._memory, self._shared.down
        gate_up, gated = memory.shared_gate_up, memory.shared_gated
        inner = self._shared.gate_up.gated(x, gate_up, gated, num_tokens, down)
        down.product(inner, memory.shared, num_tokens)
        return memory.shared[:num_tokens]


def _buffer(x: Input) -> Tensor:
    assert isinstance(x, Tensor), "experts quantise their input themselves, for the router"
    return x
