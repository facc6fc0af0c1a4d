"""Quantisation by rows, and products of quantised rows, against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inflight_kernels.torch_ops.kv_quantization import LARGEST
from inflight_kernels.torch_ops.quantization import (
    dequantize_rows,
    quantize_rows,
    quantized_linear,
)
from inflight_kernels.torch_ops.transformer import pack

DTYPES = (torch.float8_e4m3fn, torch.int8)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_the_largest_element_of_a_row_becomes_the_largest_value(
    dtype: torch.dtype, given: torch.dtype
) -> None:
    x = (drawn(5, 64) * torch.logspace(-4, 4, 5)[:, None]).to(given)
    values, scales = quantize_rows(x, dtype)
    assert (values.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, (5,))
    assert torch.equal(values.float().abs().amax(1), torch.full((5,), LARGEST[dtype]))
    assert torch.equal(scales, x.float().abs().amax(1) / LARGEST[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_nearest_ones(dtype: torch.dtype) -> None:
    x = drawn(7, 96)
    values, scales = quantize_rows(x, dtype)
    allowed = torch.arange(-127, 128).float()
    if dtype.is_floating_point:
        every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        allowed = every[every.isfinite()]
    wanted = x / scales[:, None]
    nearest = (wanted[..., None] - allowed).abs().amin(-1)
    assert torch.equal((values.float() - wanted).abs(), nearest)
    assert torch.equal(dequantize_rows(values, scales), values.float() * scales[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_stay_zeros(dtype: torch.dtype) -> None:
    values, scales = quantize_rows(torch.zeros(2, 16), dtype)
    assert not values.float().any() and scales.isfinite().all()
    out = quantized_linear(torch.zeros(2, 16), *quantize_rows(drawn(4, 16), dtype))
    assert torch.equal(out, torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_only_rows_with_nan_or_infinity_become_nan(dtype: torch.dtype, broken: float) -> None:
    x, weight = drawn(3, 16), quantize_rows(drawn(4, 16, seed=1), dtype)
    expected = quantized_linear(x, *weight)
    x[1, 5] = broken
    out = quantized_linear(x, *weight)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_the_dequantised_matrices(dtype: torch.dtype, packed: bool) -> None:
    x, bias = drawn(6, 128), drawn(40, seed=2)
    values, scales = quantize_rows(drawn(40, 128, seed=1), dtype)
    exact = dequantize_rows(*quantize_rows(x, dtype)).double()
    expected = exact @ dequantize_rows(values, scales).double().t() + bias
    weight = pack(values.float()) if packed else values
    out = quantized_linear(x, weight, scales, bias, dtype if packed else None)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float8_e4m3fn, 0.05), (torch.int8, 0.015)])
def test_the_product_is_close_to_that_of_the_unquantised_matrices(
    dtype: torch.dtype, limit: float
) -> None:
    x, weight = drawn(64, 512), drawn(256, 512, seed=1)
    out = quantized_linear(x, *quantize_rows(weight, dtype))
    expected = x @ weight.t()
    assert (out - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scales_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x = drawn(9, 64) * torch.logspace(-3, 3, 9)[:, None]
    values, scales = quantize_rows(x, dtype)
    for row in range(len(x)):
        alone, scale = quantize_rows(x[row : row + 1], dtype)
        assert torch.equal(alone[0].float(), values[row].float()) and scale == scales[row]
