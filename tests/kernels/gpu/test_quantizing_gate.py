"""The gate of an MLP whose results are quantised on the way, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graph_replay import check_replays
from inflight_kernels.ops.linear import gemm
from inflight_kernels.ops.linear.gemm import Plan
from inflight_kernels.ops.linear.scaled_rows import (
    ScaledRows,
    num_codes,
    quantize_rows,
    settle_rows,
)

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
NAN = 0x7F  # of e4m3
MARGIN = 256
SUBNORMAL = 2.0**-9  # of e4m3, the step of its smallest numbers
TOKENS = [1, 65, 100, 128, 129, 256, 300, 700]
SHAPES = [(14336, 4096), (1536, 576), (1008, 1296), (16, 16)]


def _quantized(x: Tensor) -> ScaledRows:
    out = ScaledRows.empty(*x.shape, "cuda")
    quantize_rows(x.to(torch.bfloat16), out=out)
    return out


def _random(rows: int, width: int, scale: float = 1.0) -> ScaledRows:
    return _quantized(torch.randn(rows, width, device="cuda") * scale)


def _wide(rows: ScaledRows) -> Tensor:
    return rows.values.double() * rows.scales.double()[:, None]


class Out:
    """Rows for the kernels to fill, between margins."""

    def __init__(self, num_rows: int, width: int) -> None:
        count = num_rows * width
        self._memory = torch.full((count + 2 * MARGIN,), NAN, dtype=torch.uint8, device="cuda")
        values = self._memory[MARGIN : MARGIN + count].view(FP8).view(num_rows, width)
        scales = torch.full((num_rows,), torch.nan, device="cuda")
        self.rows = ScaledRows(values, scales)
        self._codes = torch.zeros(
            num_codes(num_rows, width) + MARGIN, dtype=torch.uint8, device="cuda"
        )
        self.codes = self._codes[:-MARGIN]

    def check(self) -> ScaledRows:
        """The rows, once all of them and none of the margins are written."""
        assert (self._memory[:MARGIN] == NAN).all(), "values before the rows were overwritten"
        assert (self._memory[-MARGIN:] == NAN).all(), "values after the rows were overwritten"
        assert (self._codes[-MARGIN:] == 0).all(), "bytes after the codes were overwritten"
        assert not self.rows.values.float().isnan().any(), "values were left, or are NaN"
        assert not self.rows.scales.isnan().any(), "scales were left, or are NaN"
        return self.rows


def _gate(x: ScaledRows, weight: ScaledRows, bias: Tensor | None = None) -> ScaledRows:
    out = Out(len(x.scales), len(weight.scales) // 2)
    gemm.quantizing_gate(x, weight, bias, out=out.rows, codes=out.codes)
    return out.check()


class Expected(NamedTuple):
    """Results of a gate in float64, and by what the error of its products' sums may change them."""

    results: Tensor
    of_sums: Tensor


def _expected(x: ScaledRows, weight: ScaledRows, bias: Tensor | None = None) -> Expected:
    both = _wide(x) @ _wide(weight).T
    # A sum of random products is of about this size; its error, with 14 bits of each, far smaller.
    sizes = _wide(x).norm(dim=1)[:, None] * _wide(weight).norm(dim=1) / x.values.shape[1] ** 0.5
    if bias is not None:
        both += bias.double()
    (gate, up), (of_gate, of_up) = both.chunk(2, -1), (0.01 * sizes).chunk(2, -1)
    active = F.silu(gate)
    return Expected(active * up, up.abs() * of_gate + active.abs() * of_up)


def _exponent(largest: Tensor) -> Tensor:
    """i of the least scale 2^(8 i - 4) that takes these magnitudes to 448 at most."""
    return ((largest / 448).log2() + 4).div(8).ceil().int()


def _check(found: ScaledRows, wanted: Expected) -> None:
    """Each value is the nearest number of e4m3, or of those that it has with the scale of a part of
    its row, but for the error of a product's sums."""
    expected, of_sums = wanted
    largest = expected.abs().amax(1)
    mantissas, exponents = found.scales.frexp()
    assert (mantissas == 0.5).all() and ((exponents + 3) % 8 == 0).all(), "no coarse scales"
    exponents = (exponents + 3) // 8
    # A maximum that is close to the border of a scale may have come to lie beyond it.
    assert (exponents >= _exponent(0.99 * largest)).all()
    assert (exponents <= _exponent(1.01 * largest)).all()
    step = found.scales.double()[:, None] * SUBNORMAL
    allowed = torch.where(expected.abs() < 8 * step, step, expected.abs() / 16) + of_sums
    errors = (_wide(found) - expected).abs() / allowed
    assert errors.max() <= 1.05, errors.max()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("width", "k"), SHAPES)
def test_results_are_those_of_the_dequantised_operands(tokens: int, width: int, k: int) -> None:
    x, weight = _random(tokens, k), _random(2 * width, k, scale=k**-0.5)
    bias = torch.randn(2 * width, device="cuda").to(torch.bfloat16)
    _check(_gate(x, weight), _expected(x, weight))
    _check(_gate(x, weight, bias), _expected(x, weight, bias))


@pytest.mark.parametrize("shape", gemm._SCALED, ids=str)
@pytest.mark.parametrize("width", [496, 512, 528])
def test_parts_of_a_row_may_be_of_any_magnitude(
    monkeypatch: pytest.MonkeyPatch, width: int, shape: gemm.Shape
) -> None:
    """By tiles of every size; the last one is cut off."""
    tokens, k = 300, 1296
    cut = gemm._cut(tokens, 2 * width, True, shape, 8)
    assert cut.rounds > 1
    monkeypatch.setattr(gemm, "plan", lambda *_, **__: Plan(shape, cut.tiles, cut.clusters))
    up = torch.randn(width, k, device="cuda") * k**-0.5
    up *= 10.0 ** torch.randint(-3, 4, (width // 16, 1), device="cuda").repeat_interleave(16, 0)
    weight = _quantized(torch.cat([torch.randn(width, k, device="cuda") * k**-0.5, up]))
    x = _quantized(torch.randn(tokens, k, device="cuda"))
    expected = _expected(x, weight)
    magnitudes = expected.results.abs()
    assert (magnitudes.amax(1) > 1e4 * magnitudes.amin(1)).all()
    _check(_gate(x, weight), expected)


def test_results_are_bitwise_reproducible() -> None:
    x, weight = _random(300, 4096), _random(2 * 1536, 4096, scale=1 / 64)
    first, second = _gate(x, weight), _gate(x, weight)
    assert torch.equal(first.values.view(torch.uint8), second.values.view(torch.uint8))
    assert torch.equal(first.scales, second.scales)


def test_a_broken_token_breaks_no_other_and_one_of_zeros_is_zeros() -> None:
    values = torch.randn(200, 1296, device="cuda")
    values[70] = 0
    x, weight = _quantized(values), _random(2 * 1008, 1296, scale=1 / 36)
    whole = _gate(x, weight)
    assert (whole.values[70].float() == 0).all() and 0 < whole.scales[70] < 1e-9
    x.scales[7], x.scales[131] = torch.nan, torch.inf
    out = Out(200, 1008)
    gemm.quantizing_gate(x, weight, out=out.rows, codes=out.codes)
    assert out.rows.scales.isnan().nonzero().flatten().tolist() == [7, 131]
    others = [i for i in range(200) if i not in (7, 131)]
    assert torch.equal(_wide(out.rows)[others], _wide(whole)[others])


@pytest.mark.parametrize("tokens", [65, 150, 300])
def test_a_chain_with_dependent_launches_replays_from_a_graph(tokens: int) -> None:
    """Gate and down of four layers: a launch that reads or writes too early shows."""
    size, inner = 1024, 2048
    layers = [
        (_random(2 * inner, size, scale=size**-0.5), _random(size, inner, scale=inner**-0.5))
        for _ in range(4)
    ]
    states = [torch.randn(tokens, size, device="cuda").to(torch.bfloat16) for _ in range(5)]
    rows, gated = ScaledRows.empty(tokens, size, "cuda"), ScaledRows.empty(tokens, inner, "cuda")
    codes = torch.zeros(num_codes(tokens, inner), dtype=torch.uint8, device="cuda")

    def chain(pdl: bool) -> None:
        for i, (gate_up, down) in enumerate(layers):
            quantize_rows(states[i], out=rows, pdl=pdl)
            gemm.quantizing_gate(rows, gate_up, out=gated, codes=codes, pdl=pdl)
            gemm.linear(gated, down, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


@pytest.mark.parametrize("part", [32, 96, 112])
@pytest.mark.parametrize("num_rows", [1, 8, 300])
@pytest.mark.parametrize("width", [16, 1008, 14336])
def test_settled_rows_have_the_scale_of_their_largest_part(
    num_rows: int, width: int, part: int
) -> None:
    """Bit by bit as float32 divides and rounds; row 0 has one scale, and stays as it is."""
    out = Out(num_rows, width)
    values = (torch.randn(num_rows, width, device="cuda") * 100).clamp_(-448, 448).to(FP8)
    out.rows.values.copy_(values)
    parts = -(-width // part)
    codes = torch.randint(15, 19, (num_rows, parts), device="cuda", dtype=torch.uint8)
    codes[0] = 16
    settle_rows(out.rows, codes, part)
    settled = out.check()
    largest = codes.amax(1)
    assert torch.equal(settled.scales, torch.exp2(8 * (largest.float() - 16) - 4))
    less = torch.exp2(8 * (codes.float() - largest.float()[:, None]))
    factors = less.repeat_interleave(part, 1)[:, :width]
    expected = (values.float() * factors).to(FP8)
    assert torch.equal(settled.values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(settled.values[0].view(torch.uint8), values[0].view(torch.uint8))


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    x, weight = _random(100, 1024), _random(2 * 512, 1024)
    out = Out(100, 512)
    byte = ScaledRows.empty(100, 512, "cuda", torch.int8)
    with pytest.raises(ValueError, match=r"out\.values torch\.int8"):
        gemm.quantizing_gate(x, weight, out=byte, codes=out.codes)
    with pytest.raises(ValueError, match=r"expected at least \d+ bytes"):
        gemm.quantizing_gate(x, weight, out=out.rows, codes=out.codes[:99])
    with pytest.raises(ValueError, match=r"out\.values is .*\[100, 512\].*expected"):
        gemm.quantizing_gate(x, _random(2 * 256, 1024), out=out.rows, codes=out.codes)
    with pytest.raises(ValueError, match="half of n must be a multiple of 16"):
        gemm.quantizing_gate(x, _random(2 * 504, 1024), out=out.rows, codes=out.codes)
    with pytest.raises(ValueError, match="bias"):
        gemm.quantizing_gate(
            x, weight, torch.zeros(512, device="cuda"), out=out.rows, codes=out.codes
        )
