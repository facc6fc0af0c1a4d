"""Each vector has a scale of its own, nothing is clipped, and what is not finite stays visible."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops import transformer as ops
from inflight_kernels.torch_ops.kv_quantization import (
    KEY_CODES,
    QuantizedKV,
    clear_slots,
    dequantize,
    of_blocks,
    quantize,
    quantize_keys,
)

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 6, 4, 2, 6


def blocks() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM + 2, dtype=torch.uint8)


def restored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(*quantize(x, dtype), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "decibels"), [(torch.float8_e4m3fn, 31.5), (torch.int8, 43.5)], ids=DTYPES
)
def test_gaussian_vectors_keep_their_signal(dtype: torch.dtype, decibels: float) -> None:
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    error = restored(x, dtype) - x
    assert 20 * math.log10(float(x.norm() / error.norm())) > decibels


@each_type
@pytest.mark.parametrize("exponent", [-8, -5, -2, 0, 2, 5])
def test_no_vector_is_clipped_whatever_its_size(dtype: torch.dtype, exponent: int) -> None:
    x = 10.0**exponent * torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    got = restored(x, dtype)
    values, scales = quantize(x, dtype)
    # A step of int8, or of e4m3's numbers from 256 on; half of it is the largest error.
    steps = scales.float().unsqueeze(-1) * (1 if dtype == torch.int8 else 32)
    assert ((got - x).abs() <= 0.5001 * steps).all()
    largest = kv_quantization.LARGEST[dtype]
    assert (scales.double() * largest >= x.double().abs().amax(-1)).all()
    # And not more than float16's precision above, where it has all of it.
    normal = scales.double() > 2.0**-14
    bound = x.double().abs().amax(-1) * (1 + 2.0**-10) / largest
    assert (scales.double()[normal] <= bound[normal]).all()
    assert (values.float().abs() <= largest).all()


@each_type
def test_a_zero_vector_stays_zero(dtype: torch.dtype) -> None:
    values, scales = quantize(torch.zeros(3, 8), dtype)
    assert not values.float().any() and not scales.any()
    assert torch.equal(dequantize(values, scales, torch.bfloat16), torch.zeros(3, 8).bfloat16())


@each_type
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e8])
def test_a_vector_that_is_not_finite_or_too_large_is_nan_and_its_neighbours_are_not(
    dtype: torch.dtype, bad: float
) -> None:
    x = torch.ones(3, 8)
    x[1, 5] = bad
    values, scales = quantize(x, dtype)
    got = dequantize(values, scales, torch.float32)
    assert got[1].isnan().all()
    assert torch.allclose(got[[0, 2]], torch.ones(2, 8), rtol=1e-3)
    assert not values.float().isnan().any()


@each_type
def test_a_vector_is_quantised_alone(dtype: torch.dtype) -> None:
    x = torch.randn(40, 3, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    values, scales = quantize(x, dtype)
    for row in (0, 17, 39):
        alone, scale = quantize(x[row : row + 1], dtype)
        assert torch.equal(alone[0].view(torch.uint8), values[row].view(torch.uint8))
        assert torch.equal(scale[0], scales[row])


def test_e4m3_is_that_of_an_independent_decoder() -> None:
    """Every byte, by the definition of the format: 4 bits of exponent, biased by 7."""
    memory = of_blocks(torch.zeros(64, 1, 1, 6, dtype=torch.uint8), torch.float8_e4m3fn)
    codes = torch.arange(256, dtype=torch.uint8)
    memory.values.view(torch.uint8).copy_(codes.view(64, 1, 1, 4))
    memory.scales.fill_(1.0)
    got = kv_quantization.read_blocks(memory, torch.arange(64), torch.float32).flatten().numpy()
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    expected = np.where(bits & 128, -magnitude, magnitude)
    expected[[127, 255]] = np.nan
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- keys of e4m3


def keys_with_errors() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, 128], some of which have a few large columns, and the squared errors of each of
    `KEY_CODES` [8, n], by rounding to e4m3 with that scale."""
    k = torch.randn(512, 128, generator=torch.Generator().manual_seed(3))
    k[::2, [5, 40, 103]] *= 20
    amax = k.abs().amax(-1, keepdim=True)
    errors = []
    for code in KEY_CODES:
        rounded = (k / amax * code).to(torch.float8_e4m3fn).float() * amax / code
        errors.append((rounded - k).double().square().sum(-1))
    return k, torch.stack(errors)


def test_a_key_has_a_scale_with_little_error() -> None:
    """Less than half of that with the largest value as 448, and little more than the least."""
    k, errors = keys_with_errors()
    found = dequantize(*quantize_keys(k, torch.float8_e4m3fn), torch.float32)
    error = float((found - k).double().square().sum())
    assert error < 0.5 * float(errors[0].sum())
    assert error < 1.05 * float(errors.amin(0).sum())


def test_keys_use_all_scales() -> None:
    k, _ = keys_with_errors()
    values, _ = quantize_keys(k, torch.float8_e4m3fn)
    assert set(values.float().abs().amax(-1).tolist()) == set(KEY_CODES)


def test_the_largest_value_of_a_key_is_as_exact_as_its_scale() -> None:
    k, _ = keys_with_errors()
    for exponent in (-1, 0, 3, 5):
        keys = k * 10.0**exponent
        found = dequantize(*quantize_keys(keys, torch.float8_e4m3fn), torch.float32)
        largest = keys.abs().argmax(-1, keepdim=True)
        ratio = found.gather(-1, largest) / keys.gather(-1, largest)
        assert ((ratio - 1).abs() <= 2.0**-10).all()


def test_keys_whose_smallest_scale_alone_is_finite_stay_finite() -> None:
    k, _ = keys_with_errors()
    keys = k / k.abs().amax(-1, keepdim=True) * 2.9e7
    found = dequantize(*quantize_keys(keys, torch.float8_e4m3fn), torch.float32)
    assert found.isfinite().all()
    assert torch.equal(found, restored(keys, torch.float8_e4m3fn))


@each_type
def test_keys_that_are_zero_not_finite_or_tiny_are_quantised_as_values_are(
    dtype: torch.dtype,
) -> None:
    keys = torch.ones(5, 8)
    keys[0] = 0.0
    keys[1, 3], keys[2, 3], keys[3, 3] = math.nan, math.inf, 3e8
    keys[4] = 1e-40
    got = dequantize(*quantize_keys(keys, dtype), torch.float32)
    assert not got[0].any()
    assert got[1:4].isnan().all()
    assert got[4].isfinite().all()


@each_type
def test_no_keys_and_keys_of_any_width_are_quantised(dtype: torch.dtype) -> None:
    for width in (2, 6, 16):
        values, scales = quantize_keys(torch.ones(0, 3, width), dtype)
        assert values.shape == (0, 3, width) and scales.shape == (0, 3)
        keys = torch.randn(5, 3, width, generator=torch.Generator().manual_seed(width))
        values, scales = quantize_keys(keys, dtype)
        if dtype == torch.int8:
            keys = kv_quantization.spread_keys(keys)
        assert torch.allclose(dequantize(values, scales, torch.float32), keys, atol=0.2)


def test_keys_of_int8_are_spread_values() -> None:
    k, _ = keys_with_errors()
    for found, expected in zip(
        quantize_keys(k, torch.int8),
        quantize(kv_quantization.spread_keys(k), torch.int8),
        strict=True,
    ):
        assert torch.equal(found, expected)


# ---------------------------------------------------------------- blocks


@each_type
def test_a_block_is_its_values_and_then_its_scales(dtype: torch.dtype) -> None:
    data = blocks()
    memory = of_blocks(data, dtype)
    assert memory.shape == (NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM)
    x = torch.randn(1, NUM_HEADS, HEAD_DIM)
    kv_quantization.write(x, memory, torch.tensor([3 * BLOCK_SIZE + 2]))
    values, scales = quantize(x, dtype)
    expected = torch.zeros(BLOCK_SIZE * NUM_HEADS * HEAD_DIM, dtype=torch.uint8)
    row = NUM_HEADS * HEAD_DIM
    expected[2 * row : 3 * row] = values.view(torch.uint8).flatten()
    by_head = torch.zeros(NUM_HEADS, BLOCK_SIZE, dtype=torch.float16)
    by_head[:, 2] = scales[0]
    whole = torch.cat((expected, by_head.flatten().view(torch.uint8)))
    assert torch.equal(data[3].flatten(), whole)
    assert not data[[0, 1, 2, 4, 5]].any()


@each_type
def test_write_kv_and_copy_blocks_move_scales_with_their_values(dtype: torch.dtype) -> None:
    k_data, v_data = blocks(), blocks()
    k_cache, v_cache = of_blocks(k_data, dtype), of_blocks(v_data, dtype)
    k, v = torch.randn(2, 3, NUM_HEADS, HEAD_DIM).unbind()
    ops.write_kv(k, v, k_cache, v_cache, torch.tensor([5, 23, 0]))
    ops.copy_blocks(k_data, torch.tensor([1, 5]), torch.tensor([3, 1]))
    for memory, rows, places in (
        (k_cache, dequantize(*quantize_keys(k, dtype), torch.float32), [(3, 1), (1, 3), (0, 0)]),
        (v_cache, restored(v, dtype), [(1, 1), (5, 3), (0, 0)]),
    ):
        found = kv_quantization.read_blocks(memory, torch.arange(NUM_BLOCKS), torch.float32)
        for row, (block, offset) in zip(rows, places, strict=True):
            assert torch.equal(found[block, offset], row)


@each_type
def test_cleared_slots_are_zero_whatever_their_bytes(dtype: torch.dtype) -> None:
    data = torch.full((2, 3, *blocks().shape), 255, dtype=torch.uint8)
    layers = data.flatten(0, 1)
    clear_slots(data, torch.tensor([1, 11]))
    for layer in layers:
        found = kv_quantization.read_blocks(
            of_blocks(layer, dtype), torch.arange(NUM_BLOCKS), torch.float32
        ).flatten(0, 1)
        assert not found[[1, 11]].any()
        assert found[[0, 2, 10, 12]].isnan().all()
        assert not of_blocks(layer, dtype).scales[0, :, 1].any()


@each_type
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_attention_of_8_bits_is_that_of_the_dequantised_values(
    dtype: torch.dtype, window: int, cap: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    caches: list[QuantizedKV] = []
    for _ in range(2):
        memory = of_blocks(blocks(), dtype)
        rows = torch.randn(NUM_BLOCKS * BLOCK_SIZE, NUM_HEADS, HEAD_DIM, generator=generator)
        kv_quantization.write(rows, memory, torch.arange(len(rows)))
        caches.append(memory)
    floats = [
        kv_quantization.read_blocks(memory, torch.arange(NUM_BLOCKS), torch.float32)
        for memory in caches
    ]
    q = torch.randn(5, 4, HEAD_DIM, generator=generator)
    plan = ops.AttentionPlan(
        np.array([[4, 0, 2], [1, 3, 5]]), np.array([0, 1, 5]), np.array([11, 9]), BLOCK_SIZE
    ).within(window)
    got = ops.attend(q, caches[0], caches[1], plan, 0.4, cap)
    if dtype == torch.int8:
        q = kv_quantization.spread_queries(q)
    torch.testing.assert_close(got, ops.attend(q, floats[0], floats[1], plan, 0.4, cap))


# ---------------------------------------------------------------- keys that are spread


@pytest.mark.parametrize(
    ("head_dim", "spread"), [(48, 16), (64, 64), (80, 16), (96, 32), (112, 16), (128, 128)]
)
def test_spread_queries_and_keys_have_the_products_of_before(head_dim: int, spread: int) -> None:
    q, k = torch.randn(2, 7, 3, head_dim, dtype=torch.float64).unbind()
    products = kv_quantization.spread_queries(q) @ kv_quantization.spread_keys(k).mT
    torch.testing.assert_close(products, q @ k.mT)
    one = torch.zeros(head_dim)
    one[-1] = 1.0
    assert int((kv_quantization.spread_keys(one) != 0).sum()) == spread


def test_a_head_of_a_power_of_two_is_spread_by_sylvesters_matrix() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    eye = torch.eye(64)
    assert torch.equal(kv_quantization.spread_queries(eye), matrix / 8)
    assert torch.equal(kv_quantization.spread_keys(eye), matrix / 8)
    eye = torch.eye(32)
    assert torch.equal(kv_quantization.spread_queries(eye), matrix[:32, :32] / 4)
    assert torch.equal(kv_quantization.spread_keys(eye), matrix[:32, :32] / 8)


def test_keys_with_large_columns_lose_less_in_int8_when_they_are_spread() -> None:
    """And so do scores: a large column sets the step of all others."""
    q, k = torch.randn(2, 500, 128).unbind()
    k[:, [3, 70]] *= 20.0
    q[:, [3, 70]] /= 20.0
    exact = q.double() @ k.double().T
    plain = q @ restored(k, torch.int8).T
    queries = kv_quantization.spread_queries(q)
    better = queries @ restored(kv_quantization.spread_keys(k), torch.int8).T
    errors = [float((found - exact).norm() / exact.norm()) for found in (plain, better)]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_spread_alone_as_among_others(dtype: torch.dtype) -> None:
    rows = torch.randn(9, 3, 96).to(dtype)
    for spread in (kv_quantization.spread_queries, kv_quantization.spread_keys):
        assert torch.equal(spread(rows)[4:5], spread(rows[4:5]))
    assert kv_quantization.spread_queries(rows).dtype == dtype
    assert kv_quantization.spread_keys(rows).dtype == torch.float32
