"""Mixtures of experts on a GPU against their definition in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from grouped_matrices import random_rows
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear.grouped_rows import (
    E2M1,
    E2M1_VALUES,
    INT4,
    INT6,
    INT8,
    TABLE,
    GroupedKind,
    GroupedRows,
    dequantized,
    pack,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe.products import CLAMPED, PLAIN, SILU, product, tile_of
from inflight_kernels.ops.moe.routing import Routed, Router, route
from inflight_kernels.ops.moe.rows import gather, sum_of_experts
from inflight_kernels.ops.moe.sum_norm import ExpertRows, sum_rms_norm
from inflight_kernels.torch_ops import moe as definition
from inflight_kernels.torch_ops.moe import Routing
from inflight_kernels.torch_ops.quantization import (
    dequantize_rows,
    quantize_rows,
    spread_block,
    spread_inputs,
)
from inflight_kernels.torch_ops.transformer import clamped_swiglu, silu_mul

pytestmark = pytest.mark.gpu

TOKENS = [1, 2, 7, 33, 63, 64, 65, 130, 256, 1000]
EXPERTS = [(8, 2), (16, 1), (60, 4), (128, 8), (256, 8)]
ROUTINGS = {
    "softmax": Routing(0, renormalize=False),
    "renormalized": Routing(0, renormalize=True, scale=1.5),
    "sigmoid": Routing(0, renormalize=True, score="sigmoid", scale=2.5),
    "groups": Routing(0, renormalize=True, score="sigmoid", num_groups=4, top_groups=2),
    "best of groups": Routing(0, renormalize=False, num_groups=4, top_groups=2, best_of_group=1),
}


def _routing(name: str, top_k: int) -> Routing:
    return replace(ROUTINGS[name], top_k=top_k)


def _logits(tokens: int, experts: int, kind: str) -> Tensor:
    """Spread evenly, by Zipf's law, or with the same experts for all tokens."""
    logits = torch.randn(tokens, experts, device="cuda")
    if kind == "zipf":
        logits -= 2 * torch.arange(1, experts + 1, device="cuda").log()
    elif kind == "same":
        logits = logits * 1e-3 + torch.linspace(3, 0, experts, device="cuda")
    return logits.contiguous()


def _route(
    logits: Tensor, router: Router, tile: int, memory: Routed | None = None
) -> tuple[Routed, Tensor]:
    """Routed tokens with complete positions, and these [T, k]."""
    num_tokens, top_k = len(logits), router.routing.top_k
    routed = memory or Routed(num_tokens, router.num_experts, top_k, "cuda")
    route(logits, router, routed, tile=tile)
    rows = torch.zeros(num_tokens, 8, dtype=torch.bfloat16, device="cuda")
    gather(rows, routed, num_tokens=num_tokens, out=rows.new_zeros(num_tokens * top_k, 8))
    return routed, routed.positions[: num_tokens * top_k].view(num_tokens, top_k)


@pytest.mark.parametrize("kind", ["spread", "zipf", "same"])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("experts", "top_k"), EXPERTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_and_weights_are_those_of_the_definition(
    tokens: int, experts: int, top_k: int, name: str, kind: str
) -> None:
    logits = _logits(tokens, experts, kind)
    bias = torch.randn(experts, device="cuda") * 0.1 if name == "groups" else None
    routing = _routing(name, top_k)
    routed, _ = _route(logits, Router(routing, experts, select_bias=bias), 16)
    wanted, weights = definition.route(logits.double(), routing, bias)
    found = routed.experts.view(tokens, top_k).long()
    same = (found == wanted).all(1)
    # Scores that differ in float64 may be rounded to the same float32.
    assert same.float().mean() > 0.99
    torch.testing.assert_close(
        routed.weights[:, :top_k][same], weights[same].float(), rtol=2e-5, atol=1e-7
    )
    assert (routed.weights[:, top_k] == 1).all()


def test_of_equal_scores_the_lower_number_is_first() -> None:
    logits = torch.zeros(3, 70, device="cuda")
    logits[1, [9, 40]] = 1.0
    logits[2, 3] = -0.0
    routed, _ = _route(logits, Router(Routing(4, renormalize=True), 70), 8)
    assert routed.experts.view(3, 4).tolist() == [[0, 1, 2, 3], [9, 40, 0, 1], [0, 1, 2, 3]]


def test_logits_that_are_not_numbers_still_choose_distinct_experts() -> None:
    logits = torch.full((40, 64), float("nan"), device="cuda")
    logits[1] = float("inf")
    logits[2] = float("-inf")
    routed, positions = _route(logits, Router(Routing(8, renormalize=True), 64), 8)
    for row in routed.experts.view(40, 8).tolist():
        assert len(set(row)) == 8
        assert 0 <= min(row) <= max(row) < 64
    assert sorted(positions.flatten().tolist()) == list(range(320))


def test_parts_biases_and_a_shared_gate_are_part_of_the_logits() -> None:
    tokens, experts, routing = 50, 60, Routing(4, renormalize=False)
    parts = torch.randn(tokens, 3, experts + 1, device="cuda")
    bias = torch.randn(experts, device="cuda")
    router = Router(routing, experts, parts=3, bias=bias, shared_gate=True)
    routed, _ = _route(parts.flatten(1), router, 8)
    total = parts.double().sum(1)
    wanted, weights = definition.route(total[:, :-1] + bias, routing)
    assert (routed.experts.view(tokens, 4) == wanted).all()
    torch.testing.assert_close(routed.weights[:, :4], weights.float(), rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(routed.weights[:, 4], total[:, -1].sigmoid().float())


@pytest.mark.parametrize("kind", ["spread", "zipf", "same"])
@pytest.mark.parametrize(("experts", "top_k"), EXPERTS)
@pytest.mark.parametrize("tokens", [*TOKENS, 8192])
def test_rows_are_sorted_by_expert_and_token_and_tiles_cover_them(
    tokens: int, experts: int, top_k: int, kind: str
) -> None:
    logits = _logits(tokens, experts, kind)
    memory = Routed(tokens, experts, top_k, "cuda")
    for tile in (8, 64, 256):  # with the same memory: a plan leaves nothing behind
        routed, positions = _route(
            logits, Router(Routing(top_k, renormalize=True), experts), tile, memory
        )
        chosen = routed.experts.long()
        order = chosen.sort(stable=True).indices
        wanted = torch.empty_like(order)
        wanted[order] = torch.arange(len(order), device="cuda")
        assert (positions.flatten() == wanted).all()
        found = routed.tiles.view(-1, 4)[: int(routed.num_tiles)].tolist()
        first = 0
        expected = []
        for expert, count in enumerate(chosen.bincount(minlength=experts).tolist()):
            for at in range(0, count, tile):
                expected.append([expert, first + at, min(tile, count - at), 0])
            first += count
        assert found == expected
        assert int(routed.arrived) == 0


@dataclass
class Experts:
    """Weights of experts, and their definition."""

    gate_up: Tensor  # [E, 2 * w, d], gate above up
    down: Tensor  # [E, d, w]
    gate: int = SILU

    def of(self, expert: int, rows: Tensor) -> Tensor:
        inner = rows.double() @ self.gate_up[expert].double().t()
        gated = silu_mul(inner) if self.gate == SILU else clamped_swiglu(inner)
        return gated.to(torch.bfloat16).double() @ self.down[expert].double().t()


def _alternating(gate_up: Tensor) -> Tensor:
    """[E, 2 * w, ...] of gate above up -> as products take it."""
    experts, rows = gate_up.shape[:2]
    parts = gate_up.view(experts, 2, rows // 16, 8, *gate_up.shape[2:])
    return parts.transpose(1, 2).reshape(gate_up.shape).contiguous()


def _experts(experts: int, width: int, hidden: int, gate: int = SILU) -> Experts:
    gate_up = torch.randn(experts, 2 * width, hidden, device="cuda") * hidden**-0.5
    down = torch.randn(experts, hidden, width, device="cuda") * width**-0.5
    return Experts(gate_up.bfloat16(), down.bfloat16(), gate)


def _run(x: Tensor, logits: Tensor, weights: Experts, top_k: int) -> Tensor:
    """All kernels, as a layer runs them."""
    (tokens, hidden), (experts, rows, _) = x.shape, weights.gate_up.shape
    routed = Routed(tokens, experts, top_k, "cuda")
    tile = tile_of(tokens, experts, top_k, x.dtype)
    route(logits, Router(Routing(top_k, renormalize=True), experts), routed, tile=tile, pdl=True)
    gathered = x
    if tokens > 1:
        gathered = Guarded(tokens * top_k, hidden, dtype=x.dtype).tensor
        gather(x, routed, num_tokens=tokens, out=gathered, pdl=True)
    inner = Guarded(tokens * top_k, rows // 2, dtype=x.dtype)
    product(
        gathered,
        _alternating(weights.gate_up),
        None,
        routed,
        num_tokens=tokens,
        out=inner.tensor,
        gate=weights.gate,
        pdl=True,
    )
    outer = Guarded(tokens * top_k, hidden, dtype=x.dtype)
    # A single token's experts have a row each now.
    product(inner.tensor, weights.down, None, routed, num_tokens=tokens, out=outer.tensor, pdl=True)
    inner.check()
    total = Guarded(tokens, hidden, dtype=x.dtype)
    sum_of_experts(outer.check(), routed, total=total.tensor, pdl=True)
    return total.check()


@pytest.mark.parametrize("kind", ["spread", "zipf", "same"])
@pytest.mark.parametrize(
    ("experts", "top_k", "width", "hidden"),
    [(8, 2, 256, 512), (16, 1, 96, 200), (60, 4, 72, 136), (128, 8, 768, 2048), (32, 4, 360, 360)],
)
@pytest.mark.parametrize("tokens", [*TOKENS, 4096])
def test_a_layer_is_that_of_the_definition(
    tokens: int, experts: int, top_k: int, width: int, hidden: int, kind: str
) -> None:
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    logits = _logits(tokens, experts, kind)
    weights = _experts(experts, width, hidden)
    found = _run(x, logits, weights, top_k)
    chosen, scores = definition.route(logits, Routing(top_k, renormalize=True))
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device="cuda")
    for expert in range(experts):
        at, rank = (chosen == expert).nonzero(as_tuple=True)
        if len(at):
            outputs = weights.of(expert, x[at]).to(x.dtype).double()
            expected.index_add_(0, at, outputs * scores[at, rank, None])
    assert relative_error(found, expected) < 4 * ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("gate", [PLAIN, SILU, CLAMPED])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300, 2000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_product_applies_scales_bias_and_gate(dtype: torch.dtype, tokens: int, gate: int) -> None:
    experts, top_k, n, k = 16, 2, 416, 272
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    weight = (torch.randn(experts, n, k, device="cuda") * 2 * k**-0.5).bfloat16()
    bias = torch.randn(experts, n, device="cuda").bfloat16()
    routed = Routed(tokens, experts, top_k, "cuda")
    router = Router(Routing(top_k, renormalize=True), experts)
    logits = _logits(tokens, experts, "spread")
    route(logits, router, routed, tile=tile_of(tokens, experts, top_k, dtype))
    stored = weight if gate == PLAIN else _alternating(weight)
    stored_bias = bias if gate == PLAIN else _alternating(bias[..., None])[..., 0].contiguous()
    exact_x, exact_weight = x.double(), weight.double()
    many = tokens * top_k
    operand: Tensor | ScaledRows = stored
    gathered: Tensor | ScaledRows = torch.zeros(many, k, dtype=x.dtype, device="cuda")
    if dtype != torch.bfloat16:
        matrix = ScaledRows(*quantize_rows(stored.view(-1, k), dtype))
        exact_x = dequantize_rows(*quantize_rows(x, dtype)).double()
        exact_weight = dequantize_rows(*quantize_rows(weight.view(-1, k), dtype)).double()
        exact_weight = exact_weight.view(experts, n, k)
        gathered = ScaledRows.empty(many, k, "cuda", dtype)
        operand = ScaledRows(matrix.values.view(experts, n, k), matrix.scales)
    gather(x, routed, num_tokens=tokens, out=gathered)
    out = Guarded(many, n if gate == PLAIN else n // 2, dtype=torch.bfloat16)
    product(
        x if tokens == 1 and dtype == x.dtype else gathered,
        operand,
        stored_bias,
        routed,
        num_tokens=tokens,
        out=out.tensor,
        gate=gate,
    )
    found = out.check()[routed.positions.long()]
    expected = _sums(exact_x, exact_weight, bias, routed)
    if gate != PLAIN:
        expected = silu_mul(expected) if gate == SILU else clamped_swiglu(expected)
    bound = 2 * ROUNDING[torch.bfloat16] if dtype != torch.float8_e4m3fn else 1e-2
    assert relative_error(found, expected) < bound


def _sums(x: Tensor, weight: Tensor, bias: Tensor, routed: Routed) -> Tensor:
    """[T * k, n] float64: x [T, d] times weights [E, n, d], of each token's experts in turn."""
    chosen = routed.experts.long()
    token = torch.arange(len(chosen), device="cuda") // routed.top_k
    sums = torch.empty(len(chosen), weight.shape[1], dtype=torch.float64, device="cuda")
    for expert, (own, added) in enumerate(zip(weight, bias, strict=True)):
        at = (chosen == expert).nonzero()[:, 0]
        sums[at] = x[token[at]].double() @ own.double().t() + added.double()
    return sums


GPT_OSS = GroupedKind(E2M1, 32, minimums=False)
KINDS = [
    GPT_OSS,
    GroupedKind(E2M1, 16, minimums=False),
    GroupedKind(TABLE, 32, minimums=False),
    GroupedKind(INT4, 32, minimums=True),
    GroupedKind(INT4, 128, minimums=False),
    GroupedKind(INT4, 128, minimums=True),
    GroupedKind(INT8, 32, minimums=False),
    GroupedKind(INT8, 32, minimums=True),
    GroupedKind(INT8, 16, minimums=False),
    GroupedKind(INT6, 16, minimums=False),
    GroupedKind(INT4, 32, minimums=True, units=True),
    GroupedKind(INT6, 16, minimums=False, units=True),
    GroupedKind(INT6, 16, minimums=True, units=True),
]


def _in_records(kind: GroupedKind, experts: int, n: int, k: int) -> GroupedRows:
    """Random matrices of experts; of groups of 128 columns, all columns are one."""
    bits, rows = kind.bits, experts * n
    if kind.units:
        return random_rows(rows, k, kind)
    codes = torch.randint(0, 1 << bits, (rows, k), dtype=torch.uint8, device="cuda")
    groups = k // kind.group if k % kind.group == 0 else 1
    # Values with a deviation of 2 * k ** -0.5, as those of the tests of 16 bits.
    scales = (0.5 + torch.rand(rows, groups, device="cuda")) * k**-0.5
    middle, minimums, levels = 1 << bits - 1, None, None
    if kind.codes in (E2M1, TABLE):
        positive = torch.tensor(E2M1_VALUES)
        levels = torch.cat([positive, -positive]) if kind.codes == E2M1 else torch.randn(16) * 2
        middle = 0
    else:
        scales *= 8 / middle / 2
    if kind.minimums:
        minimums, middle = -scales * middle + torch.randn_like(scales) * k**-0.5, 0
    found = pack(codes, bits, scales, minimums, middle, levels)
    assert found.kind == kind
    return found


def _check_records(
    kind: GroupedKind,
    shape: tuple[int, int, int, int],
    tokens: int,
    gate: int,
    routing: str = "spread",
) -> None:
    """A product with experts [E, n, k], k of a token, is that of float64."""
    experts, top_k, n, k = shape
    weight = _in_records(kind, experts, n, k)
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    bias = torch.randn(experts, n, device="cuda").bfloat16()
    routed, many = Routed(tokens, experts, top_k, "cuda"), tokens * top_k
    router = Router(Routing(top_k, renormalize=True), experts)
    tile = tile_of(tokens, experts, top_k, kind)
    route(_logits(tokens, experts, routing), router, routed, tile=tile)
    gathered = torch.zeros(many, k, dtype=x.dtype, device="cuda")
    gather(x, routed, num_tokens=tokens, out=gathered)
    out = Guarded(many, n if gate == PLAIN else n // 2, dtype=torch.bfloat16)
    taken = x if tokens == 1 else gathered
    product(taken, weight, bias, routed, num_tokens=tokens, out=out.tensor, gate=gate)
    found = out.check()[routed.positions.long()]
    expected = _sums(x, dequantized(weight).view(experts, n, k), bias, routed)
    if gate != PLAIN:  # rows of gate and up by turns
        halves = expected.view(many, n // 16, 2, 8).transpose(1, 2).reshape(many, n)
        expected = silu_mul(halves) if gate == SILU else clamped_swiglu(halves)
    assert relative_error(found, expected) < 2 * ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("gate", [PLAIN, SILU, CLAMPED])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300, 2000])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_product_takes_weights_in_records(kind: GroupedKind, tokens: int, gate: int) -> None:
    """Neither rows nor columns are whole tiles."""
    k = 280 if kind.group == 128 else 288  # a group of all columns is cut if it can be
    _check_records(kind, (16, 2, 416, k), tokens, gate)


@pytest.mark.parametrize("routing", ["spread", "zipf", "same"])
@pytest.mark.parametrize("tokens", [1, 8, 63, 64, 65, 500])
def test_a_product_of_the_size_of_gpt_oss(tokens: int, routing: str) -> None:
    _check_records(GPT_OSS, (8, 4, 5760, 2880), tokens, CLAMPED, routing)
    _check_records(GPT_OSS, (8, 4, 2880, 2880), tokens, PLAIN, routing)


@pytest.mark.parametrize("shape", [(8, 2, 16, 16), (8, 2, 32, 2048), (4, 1, 2064, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 700])
def test_a_product_of_experts_smaller_than_a_tile(
    tokens: int, shape: tuple[int, int, int, int]
) -> None:
    _check_records(GroupedKind(E2M1, 16, minimums=False), shape, tokens, PLAIN)


@pytest.mark.parametrize("kind", [GPT_OSS, GroupedKind(INT4, 32, minimums=True)], ids=str)
def test_a_row_has_the_same_product_with_records_alone_and_among_others(
    kind: GroupedKind,
) -> None:
    experts, n, k = 4, 208, 416
    weight = _in_records(kind, experts, n, k)
    x = torch.randn(600, k, device="cuda").bfloat16()
    logits = _logits(600, experts, "zipf")
    router = Router(Routing(1, renormalize=True), experts)

    def run(first: int, last: int) -> Tensor:
        count = last - first
        routed = Routed(count, experts, 1, "cuda")
        tile = tile_of(count, experts, 1, kind)
        route(logits[first:last].contiguous(), router, routed, tile=tile)
        gathered = torch.zeros(count, k, dtype=x.dtype, device="cuda")
        gather(x[first:last].contiguous(), routed, num_tokens=count, out=gathered)
        out = torch.zeros(count, n, dtype=x.dtype, device="cuda")
        product(gathered, weight, None, routed, num_tokens=count, out=out)
        return out[routed.positions.long()]

    whole = run(0, 600)
    for first, last in ((0, 1), (3, 5), (100, 164), (200, 400)):
        assert torch.equal(run(first, last), whole[first:last])


def test_records_that_are_not_those_of_the_experts_are_refused() -> None:
    routed = Routed(4, 8, 2, "cuda")
    x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    out = x.new_zeros(8, 32)
    for experts, message in ((7, "224 rows of 8 experts"), (4, "a multiple of 16 for each")):
        weight = _in_records(GPT_OSS, experts, 32 if experts == 7 else 16, 64)
        with pytest.raises(ValueError, match=message):
            product(x, weight, None, routed, num_tokens=4, out=out)
    narrow = _in_records(GPT_OSS, 8, 32, 96)
    with pytest.raises(ValueError, match="expected as many columns"):
        product(x, narrow, None, routed, num_tokens=4, out=out)
    quantised = ScaledRows.empty(8, 64, "cuda", torch.int8)
    with pytest.raises(ValueError, match=r"expected as many columns, torch\.bfloat16"):
        weight = _in_records(GPT_OSS, 8, 32, 64)
        product(quantised, weight, None, routed, num_tokens=4, out=out)


def test_a_token_has_the_same_result_alone_and_among_others() -> None:
    experts, top_k, hidden = 32, 4, 512
    weights = _experts(experts, 384, hidden)
    x = torch.randn(1000, hidden, device="cuda").bfloat16()
    logits = _logits(1000, experts, "zipf")
    whole = _run(x, logits, weights, top_k)
    for first, last in ((0, 1), (3, 5), (100, 164), (500, 756)):
        part = _run(x[first:last].contiguous(), logits[first:last].contiguous(), weights, top_k)
        assert (part == whole[first:last]).all()


def test_a_shared_expert_and_what_was_before_are_added() -> None:
    tokens, top_k, hidden = 20, 3, 264
    routed = Routed(tokens, 8, top_k, "cuda")
    parts = torch.randn(tokens, 9, device="cuda")
    route(parts, Router(Routing(top_k, renormalize=False), 8, shared_gate=True), routed, tile=8)
    rows = torch.randn(tokens * top_k, hidden, device="cuda").bfloat16()
    gather(rows[:tokens], routed, num_tokens=tokens, out=torch.empty_like(rows))
    shared = torch.randn(tokens, hidden, device="cuda").bfloat16()
    before = torch.randn(tokens, hidden, device="cuda").bfloat16()
    total = Guarded(tokens, hidden, dtype=torch.bfloat16)
    total.tensor.copy_(before)
    sum_of_experts(rows, routed, shared, total=total.tensor, adds=True)
    each = rows.double()[routed.positions.long()].view(tokens, top_k, hidden)
    expected = (each * routed.weights[:, :top_k, None]).sum(1)
    expected += before.double() + shared.double() * routed.weights[:, top_k:]
    assert relative_error(total.check(), expected) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("values", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("total_type", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden"),
    [(1, 8, 2048), (20, 3, 264), (64, 8, 2048), (700, 4, 2880), (9, 31, 64), (5, 2, 7168)],
)
def test_a_norm_of_sums_is_that_of_what_was_summed(
    tokens, top_k, hidden, has_shared, total_type, values
) -> None:
    experts = 32
    routed = Routed(tokens, experts, top_k, "cuda")
    logits = torch.randn(tokens, experts, device="cuda")
    route(logits, Router(Routing(top_k, renormalize=True), experts), routed, tile=8)
    rows = torch.randn(tokens * top_k, hidden, device="cuda").bfloat16()
    gather(rows[:tokens], routed, num_tokens=tokens, out=torch.empty_like(rows))
    shared = torch.randn(tokens, hidden, device="cuda").bfloat16() if has_shared else None
    weight = torch.rand(hidden, device="cuda") + 0.5
    before = torch.randn(tokens, hidden, device="cuda").to(total_type)
    total = Guarded(tokens, hidden, dtype=total_type)
    total.tensor.copy_(before)
    out = Guarded(tokens, hidden, dtype=torch.bfloat16)
    x = ExpertRows(rows, routed, shared)
    sum_rms_norm(x, weight, 1e-6, total=total.tensor, out=out.tensor, pdl=True)
    each = rows.double()[routed.positions.long()].view(tokens, top_k, hidden)
    expected = before.double() + (each * routed.weights[:, :top_k, None]).sum(1)
    if shared is not None:
        expected += shared.double() * routed.weights[:, top_k:]
    found = total.check()
    assert relative_error(found, expected) < max(ROUNDING[total_type], 1e-6)
    scale = (found.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normed = found.double() * scale * weight
    assert relative_error(out.check(), normed) < ROUNDING[torch.bfloat16]
    if values is None:
        return
    for spread in {0, spread_block(hidden) if values == torch.int8 else 0}:
        quantized = ScaledRows.empty(tokens, hidden, torch.device("cuda"), values, spread)
        total.tensor.copy_(before)
        sum_rms_norm(x, weight, 1e-6, total=total.tensor, out=quantized, pdl=True)
        assert torch.equal(total.check(), found)
        exact, scales = quantize_rows(spread_inputs(normed.float(), spread), values)
        assert relative_error(quantized.scales, scales) < 1e-6
        back = dequantize_rows(quantized.values, quantized.scales)
        assert relative_error(back, dequantize_rows(exact, scales)) < 2e-3


def test_operands_of_a_norm_of_sums_that_do_not_fit_are_refused() -> None:
    routed = Routed(4, 8, 2, "cuda")
    rows = torch.zeros(8, 64, device="cuda").bfloat16()
    weight, total = torch.ones(64, device="cuda"), torch.zeros(4, 64, device="cuda")
    good = {"total": total, "out": torch.zeros(4, 64, device="cuda").bfloat16()}
    for bad in (
        {"total": total.half()},
        {"total": torch.zeros(5, 64, device="cuda")},
        {"out": good["out"].float()},
        {"out": good["out"][:3]},
    ):
        with pytest.raises(ValueError, match=r"total|out|rows"):
            sum_rms_norm(ExpertRows(rows, routed, None), weight, 1e-6, **(good | bad))
    with pytest.raises(ValueError, match="shared"):
        sum_rms_norm(ExpertRows(rows, routed, rows), weight, 1e-6, **good)


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 700])
def test_shared_experts_are_behind_those_that_tokens_choose(tokens: int) -> None:
    experts, top_k, num_shared = 60, 4, 2
    logits = torch.randn(tokens, experts + 1, device="cuda")
    router = Router(
        Routing(top_k, renormalize=False), experts, shared_gate=True, num_shared=num_shared
    )
    routed = Routed(tokens, experts + num_shared, top_k + num_shared, "cuda")
    route(logits, router, routed, tile=16)
    rows = torch.zeros(tokens, 8, dtype=torch.bfloat16, device="cuda")
    gather(rows, routed, num_tokens=tokens, out=rows.new_zeros(tokens * routed.top_k, 8))
    chosen, weights = definition.route(logits[:, :-1], router.routing)
    found = routed.experts.view(tokens, routed.top_k)
    assert (found[:, :top_k] == chosen).all()
    assert (found[:, top_k:] == torch.arange(experts, experts + num_shared, device="cuda")).all()
    gates = logits[:, -1:].sigmoid().expand(-1, num_shared + 1)
    torch.testing.assert_close(routed.weights, torch.cat([weights, gates], 1), rtol=2e-5, atol=1e-7)
    order = routed.experts.long().sort(stable=True).indices
    wanted = torch.empty_like(order)
    wanted[order] = torch.arange(len(order), device="cuda")
    assert (routed.positions == wanted).all()
    tiles = routed.tiles.view(-1, 4)[: int(routed.num_tiles)]
    assert int(tiles[:, 2].sum()) == tokens * routed.top_k
    assert int(tiles[tiles[:, 0] >= experts, 2].sum()) == tokens * num_shared


def test_operands_of_wrong_shapes_are_refused() -> None:
    routed = Routed(4, 8, 2, "cuda")
    router = Router(Routing(2, renormalize=True), 8)
    with pytest.raises(ValueError, match="expected 8 columns"):
        route(torch.zeros(4, 9, device="cuda"), router, routed, tile=8)
    with pytest.raises(ValueError, match="the memory is for 4"):
        route(torch.zeros(5, 8, device="cuda"), router, routed, tile=8)
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="2 times as many"):
        gather(x, routed, num_tokens=4, out=x)
    weight = torch.zeros(8, 32, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="expected 8"):
        product(x, weight, None, routed, num_tokens=4, out=x.new_zeros(8, 32))
