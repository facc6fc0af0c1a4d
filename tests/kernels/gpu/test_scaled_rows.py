"""Quantisation by rows, alone and after a norm, against the reference in torch."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels.ops.linear.scaled_rows import (
    MAX_WIDTH,
    ScaledRows,
    quantize_rows,
)
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.runtime.launch import BYTE_TYPES
from inflight_kernels.torch_ops import quantization, transformer
from inflight_kernels.torch_ops.kv_quantization import LARGEST

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
VALUES = torch.float8_e4m3fn  # see _each_type
EPS = 1e-5
WIDTHS = [16, 64, 576, 4096, 4112, 14336, MAX_WIDTH]
# Of values: half of the distance of neighbours, as a part of their magnitude and at least, plus the
# error of multiplying by the inverse.
STEPS = {torch.float8_e4m3fn: (1 / 16 + 1e-6, 2.0**-10), torch.int8: (1e-6, 0.5)}


@pytest.fixture(autouse=True, params=BYTE_TYPES, ids=["fp8", "int8"])
def _each_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "VALUES", request.param)


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(DTYPE)


def _check(out: ScaledRows, exact: torch.Tensor, tolerance: float) -> None:
    """Each value is the nearest one, and the largest of a row has the largest."""
    amax, largest, (step, smallest) = exact.abs().amax(1), LARGEST[VALUES], STEPS[VALUES]
    torch.testing.assert_close(
        out.scales.double(), amax / largest, rtol=tolerance + 1e-6, atol=1e-12 / largest
    )
    quotients = exact / out.scales.double()[:, None]
    error = (out.values.double() - quotients).abs()
    assert (error <= quotients.abs() * (step + tolerance) + smallest).all()
    assert (out.values.double().abs().amax(1)[amax > 1e-9] >= largest * (1 - tolerance)).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 257, 1100])
def test_rows_are_quantised_by_their_largest_magnitude(rows: int, width: int) -> None:
    x = _random(rows, width) * torch.logspace(-6, 3, rows, device="cuda", dtype=DTYPE)[:, None]
    out = ScaledRows.empty(rows, width, "cuda", VALUES)
    quantize_rows(x, out=out)
    _check(out, x.double(), 0.0)
    values, scales = quantization.quantize_rows(x, VALUES)
    torch.testing.assert_close(out.scales, scales, rtol=1e-6, atol=0)
    same = (out.values.float() == values.float()).double().mean()
    assert same > 0.998, "values differ from the reference in more than ties"


def test_a_row_of_zeros_stays_zero() -> None:
    out = ScaledRows.empty(2, 64, "cuda", VALUES)
    quantize_rows(torch.zeros(2, 64, dtype=DTYPE, device="cuda"), out=out)
    assert not out.values.float().any()
    assert out.scales.isfinite().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_has_a_scale_of_nan_and_breaks_no_other(broken: float) -> None:
    x = _random(3, 4096)
    clean = ScaledRows.empty(3, 4096, "cuda", VALUES)
    quantize_rows(x, out=clean)
    x[1, 77] = broken
    out = ScaledRows.empty(3, 4096, "cuda", VALUES)
    quantize_rows(x, out=out)
    assert out.scales[1].isnan()
    for row in (0, 2):
        assert torch.equal(out.values[row].view(torch.uint8), clean.values[row].view(torch.uint8))
        assert out.scales[row] == clean.scales[row]


def test_rows_of_x_can_be_strided() -> None:
    wide = torch.full((5, 3 * 576), torch.nan, dtype=DTYPE, device="cuda")
    x = wide[:, 576:1152]
    x.copy_(_random(5, 576))
    out = ScaledRows.empty(5, 576, "cuda", VALUES)
    quantize_rows(x, out=out)
    _check(out, x.double(), 0.0)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    out = ScaledRows.empty(2, 64, "cuda", VALUES)
    with pytest.raises(ValueError, match="x is"):
        quantize_rows(torch.zeros(2, 64, device="cuda"), out=out)
    with pytest.raises(ValueError, match="multiples of 16 up to"):
        quantize_rows(_random(2, 24), out=out)
    with pytest.raises(ValueError, match=r"out\.values"):
        quantize_rows(_random(2, 128), out=out)


# ---------------------------------------------------------------- after a norm


@pytest.mark.parametrize("sum_type", [DTYPE, torch.float32])
@pytest.mark.parametrize("hidden", [64, 576, 2048, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_a_norm_is_quantised_without_rounding_in_between(
    rows: int, hidden: int, sum_type: torch.dtype
) -> None:
    x, residual = _random(rows, hidden), _random(rows, hidden, scale=10.0).to(sum_type)
    weight = torch.randn(hidden, device="cuda")
    total = torch.empty(rows, hidden, dtype=sum_type, device="cuda")
    out = ScaledRows.empty(rows, hidden, "cuda", VALUES)
    rms_norm(x, weight, EPS, residual, out=out, total=total)
    assert torch.equal(total, (x.float() + residual.float()).to(sum_type))
    expected, _ = transformer.rms_norm(total.double(), weight.double(), EPS)
    _check(out, expected, 1e-5)


def test_a_norm_without_a_residual_is_quantised() -> None:
    x, weight = _random(7, 4096, scale=3.0), torch.randn(4096, device="cuda")
    out = ScaledRows.empty(7, 4096, "cuda", VALUES)
    rms_norm(x, weight, EPS, out=out)
    expected, _ = transformer.rms_norm(x.double(), weight.double(), EPS)
    _check(out, expected, 1e-5)


@pytest.mark.parametrize("hidden", [576, 4096, 16384])
@pytest.mark.parametrize("rows", [3, 1100])
def test_the_size_of_a_row_is_in_the_scale_of_its_norm_alone(rows: int, hidden: int) -> None:
    x, weight = _random(rows, hidden), torch.randn(hidden, device="cuda")
    sizes = 2.0 ** (torch.arange(rows, device="cuda", dtype=DTYPE)[:, None] % 21 - 10)
    out = [ScaledRows.empty(rows, hidden, "cuda", VALUES) for _ in range(2)]
    rms_norm(x, weight, EPS, out=out[0])
    rms_norm(x * sizes, weight, EPS, out=out[1])
    assert torch.equal(out[0].values.view(torch.uint8), out[1].values.view(torch.uint8))
    expected, _ = transformer.rms_norm((x * sizes).double(), weight.double(), EPS)
    _check(out[1], expected, 1e-5)


def test_the_norm_of_a_broken_row_has_a_scale_of_nan() -> None:
    x, weight = _random(3, 4096), torch.ones(4096, device="cuda")
    x[1, 5] = torch.nan
    out = ScaledRows.empty(3, 4096, "cuda", VALUES)
    rms_norm(x, weight, EPS, out=out)
    assert out.scales.isnan().tolist() == [False, True, False]
