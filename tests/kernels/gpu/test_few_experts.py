"""Mixtures of experts for few tokens on a GPU against their definition in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grouped_matrices import random_rows
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedKind, GroupedRows
from inflight_kernels.ops.linear.operands import NormedRows, Operand, SummedRows
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe import few
from inflight_kernels.ops.moe.few_sizes import Sizes
from inflight_kernels.ops.moe.products import CLAMPED, SILU
from inflight_kernels.ops.moe.routing import Router
from inflight_kernels.torch_ops import moe as definition
from inflight_kernels.torch_ops.moe import Routing
from inflight_kernels.torch_ops.quantization import dequantize_rows, quantize_rows
from inflight_kernels.torch_ops.transformer import clamped_swiglu, rms_norm, silu_mul

pytestmark = pytest.mark.gpu

EPS = 1e-6
Format = torch.dtype | GroupedKind
"""Of weights."""

TYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int8]
FORMATS: list[Format] = [*TYPES, *few.KINDS]
# (experts, per token, width, hidden): of public models, and odd ones.
SHAPES = [
    (128, 8, 768, 2048),
    (32, 4, 2880, 2880),
    (64, 6, 1408, 2048),
    (256, 8, 96, 208),
    (8, 2, 1024, 4096),
    (16, 1, 16, 16),
]


def _bound(weights: Format) -> float:
    # x is quantised with weights of 8 bits, not with codes.
    return 1e-2 if weights in TYPES[1:] else 2 * ROUNDING[torch.bfloat16]


def _id(weights: Format) -> str:
    return weights.name if isinstance(weights, GroupedKind) else str(weights)


class Weights:
    """Of experts: as kernels take them, and what these are in float64."""

    def __init__(self, experts: int, rows: int, columns: int, form: Format, gated: bool) -> None:
        shape = experts, rows, columns
        self.operand: Operand | GroupedRows
        if isinstance(form, GroupedKind):
            self.operand = _codes(experts * rows, columns, form)
            # Of e2m1 sums are scaled, so that no value is rounded.
            kept = torch.float32 if form.codes == grouped_rows.E2M1 else torch.bfloat16
            exact = grouped_rows.dequantized(self.operand, kept).double().view(shape)
        else:
            stored = (torch.randn(shape, device="cuda") * columns**-0.5).bfloat16()
            self.operand, exact = stored, stored.double()
            if form != torch.bfloat16:
                values, scales = quantize_rows(stored.view(-1, columns), form)
                exact = dequantize_rows(values, scales).double().view(shape)
                self.operand = ScaledRows(values.view(shape), scales)
        if gated:  # by turns of 8 -> gate above up
            turns = exact.view(experts, rows // 16, 2, 8, columns)
            exact = turns.transpose(1, 2).reshape(shape)
        self.exact = exact


# Levels that are not those of e2m1, and of each kind of codes the width of one code's values.
_LEVELS = torch.tensor([-127.0, *range(-100, 100, 15), 120.0]) / 128
_WIDTHS = {
    grouped_rows.E2M1: 3.0,
    grouped_rows.INT4: 4.6,
    grouped_rows.INT6: 18.5,
    grouped_rows.TABLE: 0.6,
}


def _codes(rows: int, columns: int, kind: GroupedKind) -> GroupedRows:
    """A random matrix. What the last group has past the columns is not 0, and must not matter."""
    if kind.units:
        return random_rows(rows, columns, kind)
    groups, positive = -(-columns // kind.group), torch.tensor(grouped_rows.E2M1_VALUES)
    levels = {
        grouped_rows.E2M1: torch.cat([positive, -positive]),
        grouped_rows.TABLE: _LEVELS,
    }.get(kind.codes)
    codes = torch.randint(
        1 << kind.bits, (rows, groups * kind.group), dtype=torch.uint8, device="cuda"
    )
    unit = columns**-0.5 / _WIDTHS.get(kind.codes, 74.0)
    scales = (torch.rand(rows, groups, device="cuda") + 0.5) * unit
    minimums = torch.randn(rows, groups, device="cuda") * columns**-0.5
    packed = grouped_rows.pack(
        codes,
        kind.bits,
        scales,
        minimums if kind.minimums else None,
        0 if levels is not None else 1 << kind.bits - 1,
        levels,
    )
    assert packed.kind == kind
    return replace(packed, k=columns)


def _turns(bias: Tensor) -> Tensor:
    experts, rows = bias.shape
    parts = bias.view(experts, 2, rows // 16, 8)
    return parts.transpose(1, 2).reshape(bias.shape).contiguous()


def _rows(x: Tensor, dtype: torch.dtype) -> tuple[Operand, Tensor]:
    """x as kernels take it, and what it is in float64."""
    if dtype == torch.bfloat16:
        return x, x.double()
    values, scales = quantize_rows(x, dtype)
    return ScaledRows(values, scales), dequantize_rows(values, scales).double()


def _logits(tokens: int, experts: int, kind: str) -> Tensor:
    logits = torch.randn(tokens, experts, device="cuda")
    if kind == "same":
        logits = logits * 1e-3 + torch.linspace(3, 0, experts, device="cuda")
    return logits.contiguous()


def _run(
    x: Tensor,
    logits: Tensor,
    router: Router,
    first: Weights,
    last: Weights,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: int = SILU,
    shared: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the kernels compute, and what their definition does in float64."""
    tokens, hidden = x.shape
    top_k, width = router.all_top_k, last.exact.shape[2]
    dtype = first.operand.values.dtype if isinstance(first.operand, ScaledRows) else x.dtype
    operand, exact = _rows(x, dtype)
    inner = Guarded(tokens * top_k, width, dtype=x.dtype)
    total = Guarded(tokens, hidden, dtype=x.dtype)
    if before is not None:
        total.tensor.copy_(before)
    stored = None if biases[0] is None else _turns(biases[0])
    layer, choice = few.GateUp(first.operand, stored, gate), few.new_choice("cuda")
    few.gate_up(operand, logits, router, layer, choice=choice, out=inner.tensor, pdl=True)
    few.down(
        inner.tensor,
        choice,
        router,
        few.Down(last.operand, biases[1]),
        shared,
        total=total.tensor,
        adds=before is not None,
        pdl=True,
    )
    scores = logits[:, : router.num_experts]
    chosen, weights = definition.route(scores.double(), router.routing, router.select_bias)
    gates = logits[:, -1:].double().sigmoid() if router.shared_gate else weights.new_ones(tokens, 1)
    further = torch.arange(router.num_experts, router.all_experts, device="cuda")
    chosen = torch.cat([chosen, further.expand(tokens, -1)], 1)
    weights = torch.cat([weights, gates.expand(-1, router.num_shared)], 1)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    found_inner = inner.check()
    for token in range(tokens):
        for rank in range(top_k):
            expert, pair = int(chosen[token, rank]), token * top_k + rank
            sums = first.exact[expert] @ exact[token]
            if biases[0] is not None:
                sums = sums + biases[0][expert].double()
            gated = silu_mul(sums[None]) if gate == SILU else clamped_swiglu(sums[None])
            assert relative_error(found_inner[pair], gated[0]) < _bound(dtype)
            # Of what the kernel computed: it rounds, and may quantise, that.
            _, row = _rows(found_inner[pair][None], dtype)
            output = last.exact[expert] @ row[0]
            if biases[1] is not None:
                output = output + biases[1][expert].double()
            expected[token] += weights[token, rank] * output
    if shared is not None:
        expected += shared.double() * gates
    if before is not None:
        expected += before.double()
    return total.check(), expected


@pytest.mark.parametrize("kind", ["spread", "same"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("experts", "top_k", "width", "hidden"), SHAPES)
def test_a_layer_is_that_of_the_definition(
    experts: int, top_k: int, width: int, hidden: int, dtype: torch.dtype, tokens: int, kind: str
) -> None:
    sizes = Sizes(hidden, width, experts, top_k, 1, dtype.itemsize)
    if not sizes.fits(tokens):
        assert tokens > 1, "a single token of all of these fits"
        return
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    router = Router(Routing(top_k, renormalize=True), experts)
    first = Weights(experts, 2 * width, hidden, dtype, gated=True)
    last = Weights(experts, hidden, width, dtype, gated=False)
    found, expected = _run(x, _logits(tokens, experts, kind), router, first, last)
    assert relative_error(found, expected) < _bound(dtype)


@pytest.mark.parametrize("kind", few.KINDS, ids=_id)
@pytest.mark.parametrize(("experts", "top_k", "width", "hidden"), SHAPES)
def test_a_layer_of_codes_is_that_of_the_definition(
    experts: int, top_k: int, width: int, hidden: int, kind: GroupedKind
) -> None:
    sizes = Sizes(hidden, width, experts, top_k, 1, torch.bfloat16.itemsize, kind)
    router = Router(Routing(top_k, renormalize=True), experts)
    first = Weights(experts, 2 * width, hidden, kind, gated=True)
    last = Weights(experts, hidden, width, kind, gated=False)
    assert sizes.fits(1)
    for tokens in filter(sizes.fits, (1, 2, 3, 5, 8)):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        for scores in ("spread", "same"):
            found, expected = _run(x, _logits(tokens, experts, scores), router, first, last)
            assert relative_error(found, expected) < _bound(kind)


@pytest.mark.parametrize("dtype", FORMATS, ids=_id)
@pytest.mark.parametrize("gate", [SILU, CLAMPED])
@pytest.mark.parametrize("tokens", [1, 4])
def test_biases_a_gated_shared_expert_and_what_was_before_are_added(
    tokens: int, gate: int, dtype: Format
) -> None:
    experts, top_k, width, hidden = 20, 3, 112, 336
    x = (2 * torch.randn(tokens, hidden, device="cuda")).bfloat16()
    first = Weights(experts, 2 * width, hidden, dtype, gated=True)
    last = Weights(experts, hidden, width, dtype, gated=False)
    biases = (
        torch.randn(experts, 2 * width, device="cuda").bfloat16(),
        torch.randn(experts, hidden, device="cuda").bfloat16(),
    )
    router = Router(Routing(top_k, renormalize=False), experts, shared_gate=True)
    found, expected = _run(
        x,
        _logits(tokens, experts + 1, "spread"),
        router,
        first,
        last,
        biases,
        gate,
        shared=torch.randn(tokens, hidden, device="cuda").bfloat16(),
        before=torch.randn(tokens, hidden, device="cuda").bfloat16(),
    )
    assert relative_error(found, expected) < _bound(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=_id)
@pytest.mark.parametrize("tokens", [1, 3])
def test_shared_experts_are_behind_those_that_tokens_choose(tokens: int, dtype: Format) -> None:
    experts, num_shared, width, hidden = 20, 2, 112, 336
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    first = Weights(experts + num_shared, 2 * width, hidden, dtype, gated=True)
    last = Weights(experts + num_shared, hidden, width, dtype, gated=False)
    router = Router(Routing(3, renormalize=False), experts, shared_gate=True, num_shared=num_shared)
    found, expected = _run(x, _logits(tokens, experts + 1, "spread"), router, first, last)
    assert relative_error(found, expected) < _bound(dtype)


@pytest.mark.parametrize("tokens", [1, 6])
def test_groups_and_biases_of_selection_choose_as_the_definition_does(tokens: int) -> None:
    experts, top_k, width, hidden = 64, 4, 64, 128
    routing = Routing(top_k, True, "sigmoid", num_groups=8, top_groups=3, scale=2.5)
    select_bias = torch.randn(experts, device="cuda") * 0.1
    router = Router(routing, experts, select_bias=select_bias)
    first = Weights(experts, 2 * width, hidden, torch.bfloat16, gated=True)
    last = Weights(experts, hidden, width, torch.bfloat16, gated=False)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    found, expected = _run(x, _logits(tokens, experts, "spread"), router, first, last)
    assert relative_error(found, expected) < _bound(torch.bfloat16)


def test_a_token_has_the_same_result_alone_and_among_others() -> None:
    experts, top_k, width, hidden = 32, 4, 384, 1024
    router = Router(Routing(top_k, renormalize=True), experts)
    for dtype in FORMATS:
        first = Weights(experts, 2 * width, hidden, dtype, gated=True)
        last = Weights(experts, hidden, width, dtype, gated=False)
        x = torch.randn(8, hidden, device="cuda").bfloat16()
        logits = _logits(8, experts, "spread")
        whole, _ = _run(x, logits, router, first, last)
        for token in range(8):
            own = slice(token, token + 1)
            alone, _ = _run(x[own], logits[own], router, first, last)
            assert (alone == whole[own]).all()


def test_layers_may_have_codes_of_different_kinds() -> None:
    experts, top_k, width, hidden = 16, 3, 320, 272
    router = Router(Routing(top_k, renormalize=True), experts)
    first = Weights(experts, 2 * width, hidden, few.KINDS[3], gated=True)
    last = Weights(experts, hidden, width, GroupedKind(grouped_rows.INT8, 16, False), gated=False)
    x = torch.randn(4, hidden, device="cuda").bfloat16()
    found, expected = _run(x, _logits(4, experts, "spread"), router, first, last)
    assert relative_error(found, expected) < _bound(torch.bfloat16)


@pytest.mark.parametrize("quantized", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(128, 2048), (65, 2880), (9, 16), (512, 8192)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_scores_are_products_with_the_norm(
    tokens: int, rows: int, hidden: int, adds: bool, quantized: torch.dtype | None
) -> None:
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weight = torch.rand(hidden, device="cuda") + 0.5
    router = (torch.randn(rows, hidden, device="cuda") * hidden**-0.5).bfloat16()
    residual = torch.randn(tokens, hidden, device="cuda")
    total = Guarded(tokens, hidden, dtype=torch.float32)
    logits = Guarded(tokens, rows, dtype=torch.float32)
    out = Guarded(tokens, hidden, dtype=torch.bfloat16)
    bytes_of = None if quantized is None else ScaledRows.empty(tokens, hidden, "cuda", quantized)
    given: NormedRows | SummedRows = NormedRows(x, weight, EPS)
    if adds:
        given = SummedRows(x, residual, total.tensor, weight, EPS)
    few.score(given, router, logits=logits.tensor, out=out.tensor, quantized=bytes_of, pdl=True)
    normed, summed = rms_norm(x, weight, EPS, residual if adds else None)
    assert relative_error(out.check(), normed) < ROUNDING[torch.bfloat16]
    if adds:
        assert torch.equal(total.check(), summed)
    exact, _ = rms_norm(x.double(), weight, EPS, residual if adds else None)
    assert relative_error(logits.check(), exact @ router.double().t()) < 1e-5
    if bytes_of is not None and quantized is not None:
        values, scales = quantize_rows(out.tensor, quantized)
        # A value half way between two may be rounded either way.
        same = bytes_of.values.view(torch.uint8) == values.view(torch.uint8)
        assert same.double().mean() > 0.99
        torch.testing.assert_close(bytes_of.scales, scales, rtol=1e-6, atol=0)


def test_operands_of_wrong_shapes_are_refused() -> None:
    router = Router(Routing(2, renormalize=True), 8)
    x = torch.zeros(9, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(8, 64, 64, dtype=torch.bfloat16, device="cuda")
    inner = torch.zeros(18, 32, dtype=torch.bfloat16, device="cuda")
    logits, choice = torch.zeros(9, 8, device="cuda"), few.new_choice("cuda")
    layer = few.GateUp(weight, None, SILU)
    with pytest.raises(ValueError, match="9 tokens"):
        few.gate_up(x, logits, router, layer, choice=choice, out=inner)
    with pytest.raises(ValueError, match="expected float32"):
        few.gate_up(x[:2], logits, router, layer, choice=choice, out=inner)
    with pytest.raises(ValueError, match="expected 4"):
        few.gate_up(x[:2], logits[:2], router, layer, choice=choice, out=inner[:3])
    with pytest.raises(ValueError, match="allowed: SILU"):
        plain = few.GateUp(weight, None, 0)
        few.gate_up(x[:2], logits[:2], router, plain, choice=choice, out=inner)
    given = NormedRows(x[:1], torch.zeros(64, device="cuda"), EPS)
    with pytest.raises(ValueError, match="the router 32"):
        few.score(given, weight[0, :, :32].contiguous(), logits=logits[:1], out=x)
