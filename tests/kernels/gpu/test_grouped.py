"""Linear layers with codes and scales of groups, against float64 of the dequantised weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graph_replay import check_replays
from grouped_matrices import random_rows
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear import grouped, grouped_gemm
from inflight_kernels.ops.linear.grouped_rows import (
    E2M1,
    INT4,
    INT6,
    INT8,
    KINDS,
    TABLE,
    GroupedKind,
    GroupedRows,
    dequantized,
)

pytestmark = pytest.mark.gpu

BOUND = 1.5 * ROUNDING[torch.bfloat16]  # weights are rounded, or are not, and so is the result
FEW, SOME = [1, 2, 3, 4, 5, 7, 8], [1, 17, 33, 64, 65, 128, 200, 300]
CASES = [(grouped.linear, m) for m in FEW] + [(grouped_gemm.linear, m) for m in SOME]
SHAPES = [(6144, 4096), (4096, 14336), (576, 1536), (1005, 1296), (124, 16), (130, 96)]
# More tiles than a GPU has multiprocessors: few tokens are multiplied as integers, if codes are.
MANY_ROWS = 2416
EACH_CODE = [
    GroupedKind(INT4, 128, False),
    GroupedKind(INT4, 32, True),
    GroupedKind(E2M1, 32, False),
    GroupedKind(TABLE, 32, False),
    GroupedKind(INT8, 16, True),
    GroupedKind(INT6, 16, False),
    GroupedKind(INT4, 32, True, units=True),
    GroupedKind(INT6, 16, False, units=True),
]

kinds = pytest.mark.parametrize("kind", EACH_CODE, ids=lambda kind: kind.name)
cases = pytest.mark.parametrize(
    ("linear", "tokens"), CASES, ids=[f"{f.__module__.rpartition('.')[2]}-{m}" for f, m in CASES]
)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def _product(x: torch.Tensor, weight: GroupedRows) -> torch.Tensor:
    return x.double() @ dequantized(weight).double().T


@kinds
@cases
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_is_that_of_the_dequantised_weight(linear, tokens, n, k, kind) -> None:
    x, weight = _random(tokens, k), random_rows(n, k, kind)
    bias, residual = _random(n), _random(tokens, n)
    expected = _product(x, weight)
    out, both = (Guarded(tokens, n, dtype=torch.bfloat16) for _ in range(2))
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), expected) < BOUND
    linear(x, weight, bias, residual, out=both.tensor)
    expected += bias.double() + residual.double()
    assert relative_error(both.check(), expected) < BOUND
    linear(x, weight, bias, residual, out=residual)
    assert torch.equal(residual, both.tensor), "the result may lie where the residual was"


@kinds
@cases
@pytest.mark.parametrize(("width", "k"), [(14336, 4096), (1536, 576), (48, 96)])
def test_a_gated_product_is_silu_of_one_half_times_the_other(
    linear, tokens, width, k, kind
) -> None:
    x, weight = _random(tokens, k), random_rows(2 * width, k, kind)
    bias, residual = _random(2 * width), _random(tokens, width)
    out = Guarded(tokens, width, dtype=torch.bfloat16)
    linear(x, weight, bias, residual, out=out.tensor, gated=True)
    gate, up = (_product(x, weight) + bias.double()).chunk(2, -1)
    expected = F.silu(gate) * up + residual.double()
    assert relative_error(out.check(), expected) < BOUND


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("linear", "tokens"), [(grouped.linear, 1), (grouped.linear, 3), (grouped_gemm.linear, 40)]
)
@pytest.mark.parametrize("n", [200, MANY_ROWS])
def test_every_kind_has_products(linear, tokens, n, kind) -> None:
    x, weight = _random(tokens, 384), random_rows(n, 384, kind)
    out = Guarded(tokens, n, dtype=torch.bfloat16)
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), _product(x, weight)) < BOUND


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_block_may_have_many_tiles(tokens, kind) -> None:
    """As of an output layer, whose sums take more shared memory than other kernels have."""
    x, weight = _random(tokens, 384), random_rows(100_016, 384, kind)
    out = Guarded(tokens, 100_016, dtype=torch.float32)
    grouped.linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), _product(x, weight)) < BOUND


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("n", "k"), [(200, 384), (17, 80), (1024, 2048)])
def test_dequantised_values_are_those_of_the_definition(n, k, kind) -> None:
    weight = random_rows(n, k, kind)
    out = Guarded(n, k, dtype=torch.bfloat16)
    grouped.dequantize(weight, out=out.tensor)
    found, expected = out.check(), dequantized(weight)
    if kind.minimums:  # the definition rounds a sum twice
        assert relative_error(found, expected) < 1e-5
    else:
        assert torch.equal(found, expected)


@kinds
@pytest.mark.parametrize("k", [136, 1296])
@pytest.mark.parametrize("tile", grouped_gemm.TILES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_every_size_come_to_the_same(monkeypatch, tile, k, gated, kind) -> None:
    """The last tiles, columns and tokens are not whole; blocks and teams may be without columns."""
    monkeypatch.setattr(grouped_gemm, "plan", lambda *shape: tile)
    n = 3 * 128 + 32
    x, weight = _random(2 * tile.tokens - 3, k), random_rows(n, k, kind)
    expected = _product(x, weight)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    out = Guarded(*expected.shape, dtype=torch.bfloat16)
    grouped_gemm.linear(x, weight, out=out.tensor, gated=gated)
    assert relative_error(out.check(), expected) < BOUND


@cases
def test_results_are_bitwise_reproducible(linear, tokens) -> None:
    x, weight = _random(tokens, 4096), random_rows(4096, 4096, EACH_CODE[0])
    first, again = (torch.empty(tokens, 4096, dtype=x.dtype, device="cuda") for _ in range(2))
    linear(x, weight, out=first)
    for _ in range(20):
        again.fill_(torch.nan)
        linear(x, weight, out=again)
        assert torch.equal(first, again)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(960, 576, False), (3072, 576, True), (576, 1536, False)]
)
def test_few_tokens_of_a_small_weight_have_the_results_that_each_has_alone(
    kind, n, k, gated
) -> None:
    """A text with drafts is then that without: a step verifies them as it would choose them."""
    weight = random_rows(n, k, kind)
    most = grouped.MAX_TOKENS
    x = _random(most, k)
    width = n // 2 if gated else n

    def run(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), width), float("nan"), dtype=torch.bfloat16, device="cuda")
        grouped.linear(rows, weight, out=out, gated=gated)
        return out

    alone = torch.cat([run(x[i : i + 1]) for i in range(most)])
    assert alone.isfinite().all()
    for m in range(2, most + 1):
        assert torch.equal(run(x[:m]), alone[:m])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(960, 576, False), (3072, 576, True), (576, 1536, False)]
)
def test_tokens_that_do_not_count_are_left_out(kind, n, k, gated) -> None:
    """Those that count have the results that they have alone, whatever is in the others."""
    weight, bias = random_rows(n, k, kind), _random(n)
    most = grouped.MAX_TOKENS
    width = n // 2 if gated else n
    x, residual = _random(most, k), _random(most, width)
    for count in range(most + 1):
        own = max(1, count)
        x[own:] = torch.nan
        expected = torch.empty(own, width, dtype=x.dtype, device="cuda")
        grouped.linear(x[:own], weight, bias, residual[:own], out=expected, gated=gated)
        out = torch.full((most, width), 7.0, dtype=x.dtype, device="cuda")
        num_tokens = torch.tensor([count], dtype=torch.int32, device="cuda")
        grouped.linear(x, weight, bias, residual, out=out, gated=gated, num_tokens=num_tokens)
        assert torch.equal(out[:own], expected)
        assert (out[own:] == 7.0).all()
        x[own:] = _random(most - own, k)


def test_all_tokens_are_computed_if_more_count() -> None:
    x, weight = _random(3, 576), random_rows(960, 576, GroupedKind(INT4, 32, True))
    expected, out = (torch.full((3, 960), torch.nan, device="cuda").to(x.dtype) for _ in range(2))
    grouped.linear(x, weight, out=expected)
    grouped.linear(x, weight, out=out, num_tokens=torch.tensor([200], device="cuda").int())
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [512, MANY_ROWS])
@pytest.mark.parametrize(
    ("linear", "tokens"),
    [(grouped.linear, 2), (grouped.linear, 4), (grouped.linear, 7), (grouped_gemm.linear, 60)],
)
def test_a_broken_token_breaks_no_other(linear, tokens, n, kind) -> None:
    x, weight = _random(tokens, 1024), random_rows(n, 1024, kind)
    clean, dirty = (torch.empty(tokens, n, dtype=x.dtype, device="cuda") for _ in range(2))
    linear(x, weight, out=clean)
    x[1] = torch.nan
    linear(x, weight, out=dirty)
    assert dirty[1].isnan().all()
    others = torch.arange(tokens, device="cuda") != 1
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize(
    ("linear", "tokens"), [(grouped.linear, 2), (grouped.linear, 7), (grouped_gemm.linear, 60)]
)
def test_rows_of_x_can_be_strided(linear, tokens) -> None:
    wide = torch.full((tokens, 3 * 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = wide[:, 576:1152]
    x.copy_(_random(tokens, 576))
    weight = random_rows(192, 576, EACH_CODE[0])
    out = Guarded(tokens, 192, dtype=x.dtype)
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), _product(x, weight)) < BOUND


@pytest.mark.parametrize(
    ("linear", "tokens"), [(grouped.linear, 1), (grouped.linear, 3), (grouped_gemm.linear, 60)]
)
def test_a_chain_with_dependent_launches_replays_from_a_graph(linear, tokens) -> None:
    """Each layer's x is the layer before's out: a launch that reads too early shows."""
    size = 2048
    weights = [random_rows(size, size, EACH_CODE[0]) for _ in range(6)]
    x = _random(tokens, size)
    states = [x, *(torch.empty_like(x) for _ in weights)]

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            linear(states[i], weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight = _random(3, 576), random_rows(192, 576, EACH_CODE[0])
    out = torch.empty(3, 192, dtype=x.dtype, device="cuda")
    with pytest.raises(ValueError, match="expected \\[m, 576\\] with up to 8 rows"):
        grouped.linear(_random(17, 576), weight, out=out)
    with pytest.raises(ValueError, match="out is"):
        grouped.linear(x, weight, out=out[:, :96])
    with pytest.raises(ValueError, match="a gated one has a multiple of 32"):
        grouped.linear(x, random_rows(48, 576, EACH_CODE[0]), out=out, gated=True)
