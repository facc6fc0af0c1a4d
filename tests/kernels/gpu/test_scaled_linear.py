"""Linear layers of quantised operands against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graph_replay import check_replays
from guarded import Guarded, relative_error
from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.ops.linear.gemm import Plan
from inflight_kernels.ops.linear.operands import NormedRows, SummedRows
from inflight_kernels.ops.linear.scaled_rows import ScaledRows, quantize_rows
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.runtime.launch import BYTE_TYPES
from inflight_kernels.torch_ops import transformer
from inflight_kernels.torch_ops.kv_quantization import LARGEST

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
VALUES = torch.float8_e4m3fn  # of quantised operands; see _each_type
EPS = 1e-5
FEW, MANY = [1, 2, 8, 9, 33, 64], [65, 100, 128, 129, 256, 300, 700]
SHAPES = [(6144, 4096), (4096, 14336), (576, 1536), (1008, 1296), (16, 16)]
ERROR = 4e-3
"""Bound of `relative_error`: 2.5e-3 for the rounding to bfloat16, and the rest for the tensor
cores, which cut sums of up to 256 columns of FP8 off at 14 bits or so."""


@pytest.fixture(autouse=True, params=BYTE_TYPES, ids=["fp8", "int8"])
def _each_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "VALUES", request.param)


def _linear(
    x: ScaledRows,
    weight: ScaledRows,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    few = len(x.scales) <= skinny_gemm.MAX_TOKENS
    kernel = skinny_gemm.linear if few else gemm.linear
    kernel(x, weight, bias, residual, out=out, gated=gated, pdl=pdl)


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(DTYPE)


def _quantized(rows: int, width: int, scale: float = 1.0) -> ScaledRows:
    """Rows of different magnitudes."""
    factors = torch.linspace(0.5, 2, rows, device="cuda", dtype=DTYPE)[:, None]
    out = ScaledRows.empty(rows, width, "cuda", VALUES)
    quantize_rows(_random(rows, width, scale=scale) * factors, out=out)
    return out


def _wide(matrix: ScaledRows) -> torch.Tensor:
    return matrix.values.double() * matrix.scales.double()[:, None]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", FEW + MANY)
def test_a_product_is_that_of_the_dequantised_operands(n: int, k: int, tokens: int) -> None:
    x, weight = _quantized(tokens, k), _quantized(n, k, scale=k**-0.5)
    bias, residual = _random(n), _random(tokens, n)
    out = Guarded(tokens, n, dtype=DTYPE)
    _linear(x, weight, out=out.tensor)
    expected = _wide(x) @ _wide(weight).T
    assert relative_error(out.check(), expected) < ERROR
    both = Guarded(tokens, n, dtype=DTYPE)
    _linear(x, weight, bias, residual, out=both.tensor)
    assert relative_error(both.check(), expected + bias.double() + residual.double()) < ERROR
    _linear(x, weight, bias, residual, out=residual)
    assert torch.equal(residual, both.tensor), "the result may lie where the residual was"


@pytest.mark.parametrize("tokens", FEW + MANY)
@pytest.mark.parametrize(("width", "k"), [(14336, 4096), (1536, 576), (1016, 1296)])
def test_a_gated_product_is_silu_of_one_half_times_the_other(
    tokens: int, width: int, k: int
) -> None:
    x, weight = _quantized(tokens, k), _quantized(2 * width, k, scale=k**-0.5)
    bias = _random(2 * width)
    out = Guarded(tokens, width, dtype=DTYPE)
    _linear(x, weight, bias, out=out.tensor, gated=True)
    gate, up = (_wide(x) @ _wide(weight).T + bias.double()).chunk(2, -1)
    assert relative_error(out.check(), F.silu(gate) * up) < ERROR


@pytest.mark.parametrize("tokens", [7, 200])
def test_products_of_small_whole_numbers_are_exact(tokens: int) -> None:
    """Each sum is within the bits that the tensor cores keep."""
    n, k = 272, 1024

    def whole(rows: int) -> ScaledRows:
        values = torch.randint(-2, 3, (rows, k), device="cuda").float().to(VALUES)
        return ScaledRows(values, torch.ones(rows, device="cuda"))

    x, weight = whole(tokens), whole(n)
    out = Guarded(tokens, n, dtype=DTYPE)
    _linear(x, weight, out=out.tensor)
    assert torch.equal(out.check(), (_wide(x) @ _wide(weight).T).to(DTYPE))


def test_long_sums_lose_no_more_than_short_ones() -> None:
    """Positive operands: their sums grow, and what the tensor cores cut off grows with them."""
    errors = {}
    for k in (512, 14336):
        values = torch.rand(128, k, device="cuda") + 0.5
        x = ScaledRows(values.to(VALUES), torch.full((128,), 2.0**-10, device="cuda"))
        out = torch.empty(128, 128, dtype=DTYPE, device="cuda")
        gemm.linear(x, x, out=out)
        expected = _wide(x) @ _wide(x).T
        errors[k] = relative_error(out, expected)
    assert errors[14336] < ERROR, errors


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", gemm._SCALED, ids=str)
@pytest.mark.parametrize("n", [976, 1024, 1040])
def test_tiles_of_every_size_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch, n: int, shape: gemm.Shape, gated: bool
) -> None:
    """Of 192 rows, the last tile has 16, 64 or 80."""
    tokens, k = 300, 1296
    x, weight = _quantized(tokens, k), _quantized(n, k, scale=k**-0.5)
    residual = _random(tokens, n // 2 if gated else n)
    first = residual.clone()
    gemm.linear(x, weight, residual=first, out=first, gated=gated)
    cut = gemm._cut(tokens, n, gated, shape, 8)
    assert cut.rounds > 1
    monkeypatch.setattr(gemm, "plan", lambda *_: Plan(shape, cut.tiles, cut.clusters))
    out = Guarded(*first.shape, dtype=DTYPE)
    gemm.linear(x, weight, residual=residual, out=out.tensor, gated=gated)
    assert torch.equal(out.check(), first), "a sum depends on the tile that it is in"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "pair"),
    [(rows, True) for rows in skinny_gemm._PAIR_ROWS]
    + [(rows, False) for rows in skinny_gemm._BLOCK_ROWS],
)
def test_tiles_of_few_tokens_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, pair: bool, gated: bool
) -> None:
    tokens, n, k = 43, 5 * rows - 8, 1296
    cut = skinny_gemm.Plan(rows, pair, 5, 10 if pair else 2)
    monkeypatch.setattr(skinny_gemm, "plan", lambda *_: cut)
    x, weight = _quantized(tokens, k), _quantized(n, k, scale=k**-0.5)
    expected = _wide(x) @ _wide(weight).T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    out = Guarded(*expected.shape, dtype=DTYPE)
    _linear(x, weight, out=out.tensor, gated=gated)
    assert relative_error(out.check(), expected) < ERROR


@pytest.mark.parametrize("tokens", [1, 64, 100, 300])
def test_results_are_bitwise_reproducible(tokens: int) -> None:
    x, weight = _quantized(tokens, 4096), _quantized(4096, 4096)
    first, again = (torch.empty(tokens, 4096, dtype=DTYPE, device="cuda") for _ in range(2))
    _linear(x, weight, out=first)
    for _ in range(10):
        again.fill_(torch.nan)
        _linear(x, weight, out=again)
        assert torch.equal(first, again)


def test_a_token_does_not_depend_on_the_number_of_tokens() -> None:
    """In one kernel: batch-invariant mode relies on it."""
    x, weight = _quantized(700, 4096), _quantized(6144, 4096)
    whole = torch.empty(700, 6144, dtype=DTYPE, device="cuda")
    gemm.linear(x, weight, out=whole)
    for tokens in (1, 17, 64, 65, 128, 129, 256, 300):
        part = torch.empty(tokens, 6144, dtype=DTYPE, device="cuda")
        gemm.linear(x.first(tokens), weight, out=part)
        assert torch.equal(part, whole[:tokens]), tokens


@pytest.mark.parametrize("tokens", [4, 64, 100, 300])
def test_a_broken_token_breaks_no_other(tokens: int) -> None:
    x, weight = _quantized(tokens, 1024), _quantized(512, 1024)
    clean, dirty = (torch.empty(tokens, 512, dtype=DTYPE, device="cuda") for _ in range(2))
    _linear(x, weight, out=clean)
    x.scales[1] = torch.nan
    _linear(x, weight, out=dirty)
    assert dirty[1].isnan().all()
    others = torch.arange(tokens, device="cuda") != 1
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
@pytest.mark.parametrize("size", [2048, 8192])
def test_a_chain_of_norms_replays_from_a_graph(tokens: int, size: int) -> None:
    """Up to 64 rows are rehearsed while the product before still writes them: what is computed then
    must not show. Of 8192 columns, a thread has two vectors."""
    weights = [_quantized(size, size, scale=size**-0.5) for _ in range(2)]
    norm = torch.rand(size, device="cuda") + 0.5
    states = [_random(tokens, size), *(_random(tokens, size) for _ in weights)]
    totals = [_random(tokens, size), *(_random(tokens, size) for _ in weights)]
    rows = ScaledRows.empty(tokens, size, "cuda", VALUES)

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            residual, total = totals[i], totals[i + 1]
            rms_norm(states[i], norm, EPS, residual, out=rows, total=total, pdl=pdl)
            _linear(rows, weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)
    check_replays(chain, totals)


@pytest.mark.parametrize("tokens", [1, 64, 150, 300])
def test_a_chain_with_dependent_launches_replays_from_a_graph(tokens: int) -> None:
    """Each layer's x is the layer before's out, quantised: a launch that reads too early shows."""
    size = 2048
    weights = [_quantized(size, size, scale=size**-0.5) for _ in range(4)]
    states = [_random(tokens, size), *(_random(tokens, size) for _ in weights)]
    rows = ScaledRows.empty(tokens, size, "cuda", VALUES)

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            quantize_rows(states[i], out=rows, pdl=pdl)
            _linear(rows, weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


# ---------------------------------------------------------------- quantised on the way


def _normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x.double() if weight is None else transformer.rms_norm(x.double(), weight, EPS)[0]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """As `quantize_rows` rounds, in float64."""
    scales = x.abs().amax(1, keepdim=True) / LARGEST[VALUES]
    quotients = (x / scales).float()
    values = quotients if VALUES.is_floating_point else quotients.round()
    return values.to(VALUES).double() * scales


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "gated"),
    [
        (6144, 4096, False),
        (4096, 14336, False),
        (28672, 4096, True),
        (576, 1536, False),
        (3072, 576, True),
        (1008, 1296, False),
        (16, 16, False),
    ],
)
@pytest.mark.parametrize("tokens", range(1, skinny_gemm.MAX_QUANTIZED_TOKENS + 1))
def test_x_is_normed_and_quantised_on_the_way(
    n: int, k: int, gated: bool, tokens: int, norm: bool
) -> None:
    x, weight = _random(tokens, k, scale=3.0), _quantized(n, k, scale=k**-0.5)
    factors = torch.randn(k, device="cuda") if norm else None
    rows = NormedRows(x, factors, EPS) if factors is not None else x
    width = n // 2 if gated else n
    bias, residual = _random(n), _random(tokens, width)
    out = Guarded(tokens, width, dtype=DTYPE)
    skinny_gemm.quantizing_linear(rows, weight, bias, residual, out=out.tensor, gated=gated)
    exact = _normed(x, None if factors is None else factors.double())
    expected = _rounded(exact) @ _wide(weight).T + bias.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    # A few values are ties, or nearly, and rounded the other way.
    assert relative_error(out.check(), expected + residual.double()) < 2 * ERROR
    skinny_gemm.quantizing_linear(rows, weight, bias, residual, out=residual, gated=gated)
    assert torch.equal(residual, out.tensor), "the result may lie where the residual was"


@pytest.mark.parametrize("norm", [False, True])
def test_quantising_on_the_way_gives_what_two_kernels_give(norm: bool) -> None:
    x, weight = _random(3, 4096), _quantized(4096, 4096)
    factors = torch.randn(4096, device="cuda")
    rows = ScaledRows.empty(3, 4096, "cuda", VALUES)
    if norm:
        rms_norm(x, factors, EPS, out=rows)
    else:
        quantize_rows(x, out=rows)
    expected, out = (torch.empty(3, 4096, dtype=DTYPE, device="cuda") for _ in range(2))
    skinny_gemm.linear(rows, weight, out=expected)
    given = NormedRows(x, factors, EPS) if norm else x
    skinny_gemm.quantizing_linear(given, weight, out=out)
    assert relative_error(out, expected.double()) < ERROR
    for _ in range(10):
        again = torch.full_like(out, torch.nan)
        skinny_gemm.quantizing_linear(given, weight, out=again)
        assert torch.equal(again, out)


def test_a_broken_row_breaks_no_other_on_the_way() -> None:
    x, weight = _random(3, 1024), _quantized(512, 1024)
    clean, dirty = (torch.empty(3, 512, dtype=DTYPE, device="cuda") for _ in range(2))
    skinny_gemm.quantizing_linear(x, weight, out=clean)
    x[1, 9] = torch.inf
    skinny_gemm.quantizing_linear(x, weight, out=dirty)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[::2], clean[::2])


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_chain_that_quantises_on_the_way_replays_from_a_graph(tokens: int) -> None:
    size = 2048
    weights = [_quantized(size, size, scale=size**-0.5) for _ in range(6)]
    norm = torch.rand(size, device="cuda") + 0.5
    states = [_random(tokens, size), *(_random(tokens, size) for _ in weights)]

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            x = NormedRows(states[i], norm, EPS) if i % 2 else states[i]
            skinny_gemm.quantizing_linear(x, weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    x, weight = _quantized(65, 64), _quantized(32, 64)
    out = torch.empty(65, 32, dtype=DTYPE, device="cuda")
    with pytest.raises(ValueError, match="both be quantised"):
        gemm.linear(_random(65, 64), weight, out=out)
    with pytest.raises(ValueError, match="multiple of 16"):
        gemm.linear(_narrow(x), _narrow(weight), out=out)
    with pytest.raises(ValueError, match="out is"):
        gemm.linear(x, weight, out=out.float())
    with pytest.raises(ValueError, match="up to 4 rows"):
        skinny_gemm.quantizing_linear(_random(5, 64), weight, out=out[:5])
    with pytest.raises(ValueError, match=r"weight\.scales"):
        gemm.linear(x, weight._replace(scales=weight.scales[:8]), out=out)


def _narrow(matrix: ScaledRows) -> ScaledRows:
    return matrix._replace(values=matrix.values.view(torch.uint8)[:, :56].contiguous().view(VALUES))


@pytest.mark.parametrize(("n", "k"), [(5120, 2048), (576, 1536), (3072, 576), (16, 16)])
@pytest.mark.parametrize("tokens", range(1, skinny_gemm.MAX_QUANTIZED_TOKENS + 1))
def test_a_sum_is_normed_and_quantised_on_the_way(n: int, k: int, tokens: int) -> None:
    x, weight = _random(tokens, k, scale=3.0), _quantized(n, k, scale=k**-0.5)
    residual, bias = torch.randn(tokens, k, device="cuda"), _random(n)
    factors = torch.randn(k, device="cuda")
    total, out = Guarded(tokens, k, dtype=torch.float32), Guarded(tokens, n, dtype=DTYPE)
    given = SummedRows(x, residual, total.tensor, factors, EPS)
    for pdl in (False, True):
        skinny_gemm.summing_linear(given, weight, bias, out=out.tensor, pdl=pdl)
        summed = x.float() + residual
        assert torch.equal(total.check(), summed)
        exact = _normed(summed, factors.double())
        expected = _rounded(exact) @ _wide(weight).T + bias.double()
        assert relative_error(out.check(), expected) < 2 * ERROR
