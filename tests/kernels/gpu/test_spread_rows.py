"""INT8 rows that are spread before they are quantised, and their products, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graph_replay import check_replays
from guarded import Guarded, relative_error
from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.ops.linear.operands import NormedRows, SummedRows
from inflight_kernels.ops.linear.scaled_rows import MAX_WIDTH, ScaledRows, quantize_rows
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.torch_ops import quantization, transformer
from inflight_kernels.torch_ops.quantization import (
    dequantize_rows,
    spread_block,
    spread_inputs,
    spread_weight,
)

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
INT8 = torch.int8
EPS = 1e-5
ERROR = 4e-3  # as in test_scaled_linear.py
FEW = range(1, skinny_gemm.MAX_QUANTIZED_TOKENS + 1)
BROKEN = [torch.nan, torch.inf, -torch.inf]
# Rows, or the vectors of a warp, end between blocks and between groups of lanes; a block may be
# smaller than the width allows.
SPREAD = [
    (16, 16),
    (48, 16),
    (1296, 16),
    (4112, 16),
    (4096, 16),
    (96, 32),
    (2080, 32),
    (4096, 32),
    (64, 64),
    (576, 64),
    (1536, 64),
    (4096, 64),
    (14336, 64),
    (MAX_WIDTH, 64),
]
NORMED = [(width, block) for width, block in SPREAD if width <= 8192]
PRODUCTS = [
    (6144, 4096, 64),
    (6144, 4096, 32),
    (6144, 4096, 16),
    (4096, 14336, 64),
    (576, 1536, 64),
    (3072, 576, 64),
    (1040, 2080, 32),
    (1008, 1296, 16),
    (48, 96, 32),
    (32, 16, 16),
]
"""n, k and the columns of a block."""


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal values, and a column of much larger ones if they are rows."""
    found = torch.randn(*shape, device="cuda")
    if len(shape) == 2:
        found[:, shape[1] // 3] = 30.0
    return (found * scale).to(DTYPE)


def _weight(n: int, k: int, block: int) -> ScaledRows:
    exact = torch.randn(n, k, device="cuda") * k**-0.5
    return ScaledRows(*quantization.quantize_rows(spread_weight(exact, block), INT8), block)


def _spread_back(rows: ScaledRows) -> Tensor:
    """A weight, in float64 and its own columns."""
    wide = rows.values.double() * rows.scales.double()[:, None]
    return spread_inputs(wide, rows.spread)


def _rounded(x: Tensor, block: int) -> Tensor:
    """x [m, k], quantised after it was spread, in float64 and its own columns."""
    wide = spread_inputs(x.double(), block)
    scales = wide.abs().amax(1, keepdim=True) / 127
    return spread_weight((wide / scales).round() * scales, block)


def _check(out: ScaledRows, x: Tensor, tolerance: float) -> None:
    """Each byte is the nearest one to the definition in float64, or the next one to a tie, and the
    largest of a row has the largest.

    Args:
        out: quantised.
        x: float64, before it is spread.
        tolerance: of x, in parts of the largest value of its row.
    """
    exact = spread_inputs(x, out.spread)
    amax = exact.abs().amax(1)
    torch.testing.assert_close(out.scales.double(), amax / 127, rtol=tolerance, atol=1e-14)
    quotients = exact / out.scales.double()[:, None]
    error = (out.values.double() - quotients).abs()
    assert (error <= 0.5 + 127 * tolerance).all(), float(error.max())
    assert (out.values.double().abs().amax(1)[amax > 1e-9] == 127).all()


def _guarded(rows: int, width: int, block: int) -> tuple[ScaledRows, Tensor]:
    """Memory for quantised rows, and all of it, margins of 64 bytes included."""
    memory = torch.full((rows * width + 128,), 0x5A, dtype=INT8, device="cuda")
    scales = torch.full((rows,), -1.0, device="cuda")
    return ScaledRows(memory[64:-64].view(rows, width), scales, block), memory


def _check_margins(memory: Tensor) -> None:
    assert (memory[:64] == 0x5A).all() and (memory[-64:] == 0x5A).all(), "bytes beside the rows"


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("width", "block"), SPREAD)
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_rows_are_spread_before_they_are_quantised(rows: int, width: int, block: int) -> None:
    x = _random(rows, width) * torch.logspace(-6, 3, rows, device="cuda", dtype=DTYPE)[:, None]
    out, memory = _guarded(rows, width, block)
    quantize_rows(x, out=out)
    _check_margins(memory)
    _check(out, x.double(), 2e-6)
    values, scales = quantization.quantize_rows(spread_inputs(x, block), INT8)
    torch.testing.assert_close(out.scales, scales, rtol=1e-6, atol=0)
    off = (out.values.int() - values.int()).abs()
    assert off.max() <= 1 and (off > 0).double().mean() < 2e-3, "differ in more than ties"


def test_strided_rows_are_spread() -> None:
    wide = torch.full((5, 3 * 576), torch.nan, dtype=DTYPE, device="cuda")
    x = wide[:, 576:1152]
    x.copy_(_random(5, 576))
    out = ScaledRows.empty(5, 576, "cuda", INT8, 64)
    quantize_rows(x, out=out)
    _check(out, x.double(), 2e-6)


def test_spread_rows_of_zeros_stay_zero() -> None:
    out = ScaledRows.empty(2, 64, "cuda", INT8, 64)
    quantize_rows(torch.zeros(2, 64, dtype=DTYPE, device="cuda"), out=out)
    assert not out.values.any() and out.scales.isfinite().all()


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("width", "block"), [(4096, 64), (1296, 16)])
def test_a_broken_spread_row_breaks_no_other(width: int, block: int, broken: float) -> None:
    x = _random(3, width)
    clean, dirty = (ScaledRows.empty(3, width, "cuda", INT8, block) for _ in range(2))
    quantize_rows(x, out=clean)
    x[1, 77] = broken
    quantize_rows(x, out=dirty)
    assert dirty.scales.isnan().tolist() == [False, True, False]
    for row in (0, 2):
        assert torch.equal(dirty.values[row], clean.values[row])
        assert dirty.scales[row] == clean.scales[row]


# ---------------------------------------------------------------- after a norm


@pytest.mark.parametrize("sum_type", [DTYPE, torch.float32])
@pytest.mark.parametrize(("hidden", "block"), NORMED)
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_a_norm_is_spread_and_quantised(
    rows: int, hidden: int, block: int, sum_type: torch.dtype
) -> None:
    x, residual = _random(rows, hidden), _random(rows, hidden, scale=10.0).to(sum_type)
    weight = torch.randn(hidden, device="cuda")
    total = torch.empty(rows, hidden, dtype=sum_type, device="cuda")
    out, memory = _guarded(rows, hidden, block)
    rms_norm(x, weight, EPS, residual, out=out, total=total)
    _check_margins(memory)
    assert torch.equal(total, (x.float() + residual.float()).to(sum_type))
    expected, _ = transformer.rms_norm(total.double(), weight.double(), EPS)
    _check(out, expected, 1e-5)


@pytest.mark.parametrize(("hidden", "block"), [*NORMED, (14336, 64), (MAX_WIDTH, 64)])
def test_a_norm_without_a_residual_is_spread_and_quantised(hidden: int, block: int) -> None:
    x, weight = _random(7, hidden, scale=3.0), torch.randn(hidden, device="cuda")
    out = ScaledRows.empty(7, hidden, "cuda", INT8, block)
    rms_norm(x, weight, EPS, out=out)
    expected, _ = transformer.rms_norm(x.double(), weight.double(), EPS)
    _check(out, expected, 1e-5)


def test_the_spread_norm_of_a_broken_row_has_a_scale_of_nan() -> None:
    x, weight = _random(3, 4096), torch.ones(4096, device="cuda")
    x[1, 5] = torch.nan
    out = ScaledRows.empty(3, 4096, "cuda", INT8, 64)
    rms_norm(x, weight, EPS, out=out)
    assert out.scales.isnan().tolist() == [False, True, False]


# ---------------------------------------------------------------- products


@pytest.mark.parametrize(("n", "k", "block"), PRODUCTS)
@pytest.mark.parametrize("tokens", [*range(1, 10), 64, 65, 300])
def test_a_product_of_spread_rows_is_that_of_their_own_columns(
    n: int, k: int, block: int, tokens: int
) -> None:
    x, weight, bias = _random(tokens, k), _weight(n, k, block), _random(n)
    rows = ScaledRows.empty(tokens, k, "cuda", INT8, block)
    quantize_rows(x, out=rows)
    out = Guarded(tokens, n, dtype=DTYPE)
    few = tokens <= skinny_gemm.MAX_TOKENS
    linear = skinny_gemm.linear if few else gemm.linear
    linear(rows, weight, bias, out=out.tensor)
    exact = _spread_back(weight)
    found = spread_weight(rows.values.double() * rows.scales.double()[:, None], block)
    assert relative_error(out.check(), found @ exact.T + bias.double()) < ERROR
    # A few values are ties, or nearly, and rounded the other way.
    assert relative_error(out.tensor, _rounded(x, block) @ exact.T + bias.double()) < 2 * ERROR


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k", "block"), PRODUCTS)
@pytest.mark.parametrize("tokens", FEW)
def test_x_is_spread_on_the_way(
    n: int, k: int, block: int, tokens: int, gated: bool, norm: bool
) -> None:
    x, weight = _random(tokens, k, scale=3.0), _weight(n, k, block)
    factors = torch.randn(k, device="cuda") if norm else None
    rows = x if factors is None else NormedRows(x, factors, EPS)
    width = n // 2 if gated else n
    bias, residual = _random(n), _random(tokens, width)
    out = Guarded(tokens, width, dtype=DTYPE)
    skinny_gemm.quantizing_linear(rows, weight, bias, residual, out=out.tensor, gated=gated)
    wide = x.double()
    if factors is not None:
        wide, _ = transformer.rms_norm(wide, factors.double(), EPS)
    expected = _rounded(wide, block) @ _spread_back(weight).T + bias.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    # A few values are ties, or nearly, and rounded the other way.
    assert relative_error(out.check(), expected + residual.double()) < 2 * ERROR


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("n", "k", "block"), PRODUCTS)
def test_spreading_on_the_way_gives_what_two_kernels_give(
    n: int, k: int, block: int, norm: bool
) -> None:
    wide = torch.full((3, 2 * k), torch.nan, dtype=DTYPE, device="cuda")
    x, weight = wide[:, :k], _weight(n, k, block)  # rows may be strided
    x.copy_(_random(3, k))
    factors = torch.randn(k, device="cuda")
    rows = ScaledRows.empty(3, k, "cuda", INT8, block)
    if norm:
        rms_norm(x.contiguous(), factors, EPS, out=rows)
    else:
        quantize_rows(x, out=rows)
    expected, out = (torch.empty(3, n, dtype=DTYPE, device="cuda") for _ in range(2))
    skinny_gemm.linear(rows, weight, out=expected)
    given = NormedRows(x, factors, EPS) if norm else x
    skinny_gemm.quantizing_linear(given, weight, out=out)
    assert relative_error(out, expected.double()) < ERROR
    for _ in range(10):
        again = torch.full_like(out, torch.nan)
        skinny_gemm.quantizing_linear(given, weight, out=again)
        assert torch.equal(again, out)


@pytest.mark.parametrize(("n", "k", "block"), [one for one in PRODUCTS if one[1] <= 4096])
@pytest.mark.parametrize("tokens", FEW)
def test_a_sum_is_normed_and_spread_on_the_way(n: int, k: int, block: int, tokens: int) -> None:
    x, weight, bias = _random(tokens, k, scale=3.0), _weight(n, k, block), _random(n)
    residual, factors = torch.randn(tokens, k, device="cuda"), torch.randn(k, device="cuda")
    total, out = Guarded(tokens, k, dtype=torch.float32), Guarded(tokens, n, dtype=DTYPE)
    given = SummedRows(x, residual, total.tensor, factors, EPS)
    for pdl in (False, True):
        skinny_gemm.summing_linear(given, weight, bias, out=out.tensor, pdl=pdl)
        summed = x.float() + residual
        assert torch.equal(total.check(), summed)
        exact, _ = transformer.rms_norm(summed.double(), factors.double(), EPS)
        expected = _rounded(exact, block) @ _spread_back(weight).T + bias.double()
        assert relative_error(out.check(), expected) < 2 * ERROR


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("k", "block"), [(1024, 64), (1296, 16)])
def test_a_broken_row_breaks_no_other_if_spread_on_the_way(
    k: int, block: int, broken: float
) -> None:
    x, weight = _random(3, k), _weight(512, k, block)
    clean, dirty = (torch.empty(3, 512, dtype=DTYPE, device="cuda") for _ in range(2))
    skinny_gemm.quantizing_linear(x, weight, out=clean)
    x[1, 9] = broken
    skinny_gemm.quantizing_linear(x, weight, out=dirty)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[::2], clean[::2])


@pytest.mark.parametrize("tokens", [1, 4, 20, 300])
def test_spread_rows_lose_less_than_others_with_a_large_column(tokens: int) -> None:
    n, k = 1024, 2048
    x, exact = _random(tokens, k), torch.randn(n, k, device="cuda")
    errors = []
    for block in (0, spread_block(k)):
        weight = quantization.quantize_rows(spread_weight(exact, block), INT8)
        rows = ScaledRows.empty(tokens, k, "cuda", INT8, block)
        quantize_rows(x, out=rows)
        out = torch.empty(tokens, n, dtype=DTYPE, device="cuda")
        linear = skinny_gemm.linear if tokens <= skinny_gemm.MAX_TOKENS else gemm.linear
        linear(rows, ScaledRows(*weight, block), out=out)
        found = spread_weight(dequantize_rows(rows.values, rows.scales), block)
        errors.append(float((found - x.float()).norm() / x.float().norm()))
        assert relative_error(out, x.double() @ exact.double().T) < (0.1 if block == 0 else 0.03)
    assert errors[1] < 0.5 * errors[0], errors


@pytest.mark.parametrize("tokens", [1, 4, 20, 300])
def test_a_chain_of_spread_products_replays_from_a_graph(tokens: int) -> None:
    """Each layer's x is the layer before's out: a launch that reads too early shows."""
    size = 2048
    weights = [_weight(size, size, 64) for _ in range(6)]
    norm = torch.rand(size, device="cuda") + 0.5
    states = [_random(tokens, size), *(_random(tokens, size) for _ in weights)]
    rows = ScaledRows.empty(tokens, size, "cuda", INT8, 64)

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            x, out = states[i], states[i + 1]
            if tokens <= skinny_gemm.MAX_QUANTIZED_TOKENS:
                given = NormedRows(x, norm, EPS) if i % 2 else x
                skinny_gemm.quantizing_linear(given, weight, out=out, pdl=pdl)
                continue
            if i % 2:
                rms_norm(x, norm, EPS, out=rows, pdl=pdl)
            else:
                quantize_rows(x, out=rows, pdl=pdl)
            linear = skinny_gemm.linear if tokens <= skinny_gemm.MAX_TOKENS else gemm.linear
            linear(rows, weight, out=out, pdl=pdl)

    check_replays(chain, states)
