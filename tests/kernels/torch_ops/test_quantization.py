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
    spread_block,
    spread_inputs,
    spread_weight,
)
from inflight_kernels.torch_ops.transformer import pack

BLOCKS = (16, 32, 64)
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


# ---------------------------------------------------------------- spread rows


def sylvester(size: int) -> Tensor:
    """Sylvester's Hadamard matrix [size, size] of ones and minus ones, size a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def test_blocks_are_the_largest_powers_of_two_that_divide_a_width() -> None:
    widths = (4096, 14336, 576, 64, 2080, 96, 1296, 48, 16)
    assert [spread_block(width) for width in widths] == [64, 64, 64, 64, 32, 32, 16, 16, 16]
    assert [spread_block(width) for width in (24, 8, 100, 17)] == [0, 0, 0, 0]


@pytest.mark.parametrize("block", BLOCKS)
def test_spread_rows_are_products_with_sylvesters_matrix(block: int) -> None:
    x = drawn(5, 3 * block)
    exact = (x.double().unflatten(1, (3, block)) @ sylvester(block).double()).flatten(1)
    inputs, weight = spread_inputs(x, block), spread_weight(x, block)
    assert inputs.dtype == weight.dtype == torch.float32
    factors = {16: (4, 4), 32: (4, 8), 64: (8, 8)}[block]
    for found, factor in zip((inputs, weight), factors, strict=True):
        torch.testing.assert_close(found.double(), exact / factor, rtol=1e-5, atol=1e-5)
    wide = spread_inputs(x.double(), block)
    torch.testing.assert_close(wide, exact / factors[0], rtol=1e-12, atol=1e-12)
    half = spread_inputs(x.bfloat16(), block)
    assert torch.equal(half, spread_inputs(x.bfloat16().float(), block))


@pytest.mark.parametrize("block", BLOCKS)
def test_spreading_keeps_products_and_is_reversed_by_that_of_the_other_side(block: int) -> None:
    x, weight = drawn(6, 5 * block).double(), drawn(7, 5 * block, seed=1).double()
    product = spread_inputs(x, block) @ spread_weight(weight, block).t()
    torch.testing.assert_close(product, x @ weight.t(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(spread_inputs(spread_weight(weight, block), block), weight)


def test_rows_without_blocks_stay_as_they_are() -> None:
    x = drawn(3, 24)
    assert spread_inputs(x, 0) is x and spread_weight(x, 0) is x


def test_a_spread_row_does_not_depend_on_the_others() -> None:
    x = drawn(9, 576)
    whole = spread_inputs(x, 64)
    for row in range(len(x)):
        assert torch.equal(spread_inputs(x[row : row + 1], 64)[0], whole[row])


@pytest.mark.parametrize("width", [512, 480, 496])
def test_a_large_column_costs_little_if_rows_are_spread(width: int) -> None:
    block = spread_block(width)
    x, weight = drawn(64, width), drawn(256, width, seed=1)
    x[:, 7] *= 100.0
    expected = x.double() @ weight.double().t()

    def error(block: int) -> float:
        values, scales = quantize_rows(spread_weight(weight, block), torch.int8)
        out = quantized_linear(x, values, scales, spread=block)
        return float((out - expected).norm() / expected.norm())

    assert error(block) < 0.5 * error(0)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_only_spread_rows_with_nan_or_infinity_become_nan(broken: float) -> None:
    x = drawn(3, 128)
    weight = quantize_rows(spread_weight(drawn(4, 128, seed=1), 64), torch.int8)
    expected = quantized_linear(x, *weight, spread=64)
    x[1, 5] = broken
    out = quantized_linear(x, *weight, spread=64)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])
