"""Parts of fused layers get one format, and what is quantised already stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.config import Quantization
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.matrix import (
    DTYPES,
    Matrix,
    QuantizedMatrix,
    column_parts,
    dequantized,
    in_one_format,
    quantize,
    rounded,
)
from inflight.models.quantization.rounding import quantize_groups

FP8, INT8 = DTYPES["fp8"], DTYPES["int8"]


def drawn(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def same(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    """Bit for bit."""
    return (
        (one.dtype, one.spread) == (other.dtype, other.spread)
        and torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        and torch.equal(one.scales, other.scales)
    )


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(FP8, "auto"), (FP8, "fp8"), (INT8, "auto"), (INT8, "int8")]
)
def test_parts_of_one_format_are_joined_bit_for_bit(
    dtype: torch.dtype, quantization: Quantization
) -> None:
    whole = quantize(drawn(20), dtype)
    parts = whole.split([7, 3, 10])
    assert [part.shape for part in parts] == [(7, 32), (3, 32), (10, 32)]
    joined = in_one_format(parts, quantization)
    assert isinstance(joined, QuantizedMatrix) and same(joined, whole)


@pytest.mark.parametrize(
    ("parts", "quantization"),
    [
        ((quantize(drawn(4), FP8), drawn(6)), "auto"),
        ((quantize(drawn(4), FP8), quantize(drawn(6), INT8)), "auto"),
        ((drawn(4), drawn(6)), "auto"),
        ((quantize(drawn(4), FP8), quantize(drawn(6), FP8)), "none"),
    ],
    ids=["one part is not quantised", "two formats", "none is quantised", "the setting"],
)
def test_parts_that_differ_are_dequantised(
    parts: tuple[Matrix, ...], quantization: Quantization
) -> None:
    found = in_one_format(parts, quantization)
    assert isinstance(found, list)
    part: Tensor
    for part, given in zip(found, parts, strict=True):
        expected = given.dequantized() if isinstance(given, QuantizedMatrix) else given
        assert torch.equal(part, expected)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_setting_quantises_the_parts_that_are_not(kind: Quantization) -> None:
    plain, stored = drawn(4).bfloat16(), quantize(drawn(6, seed=1), DTYPES[kind])
    found = in_one_format([plain, stored], kind)
    assert isinstance(found, QuantizedMatrix)
    assert all(
        same(part, expected)
        for part, expected in zip(
            found.split([4, 6]), (quantize(plain, DTYPES[kind]), stored), strict=True
        )
    )


def test_int4_rounds_the_parts_that_are_not_in_groups() -> None:
    plain, stored = drawn(4).bfloat16(), quantize_groups(drawn(6, seed=1), 32)
    first = rounded(plain)
    assert isinstance(first, GroupedMatrix) and rounded(stored) is stored
    assert torch.equal(first.dequantized(), quantize_groups(plain, 32).dequantized())
    found = in_one_format([first, stored], "int4")
    assert isinstance(found, list) and torch.equal(found[1], stored.dequantized())


def test_int4_rounds_groups_of_more_bits() -> None:
    codes = torch.arange(4 * 64).view(4, 64).to(torch.uint8)
    matrix = GroupedMatrix(codes, 8, torch.ones(4, 2), zero=128)
    found = rounded(matrix)
    assert isinstance(found, GroupedMatrix) and found.bits == 4
    expected = quantize_groups(matrix.dequantized(), 64)
    assert torch.equal(found.dequantized(), expected.dequantized())


def test_int4_leaves_widths_that_have_no_groups() -> None:
    weight = torch.randn(4, 48)
    assert rounded(weight) is weight


@pytest.mark.parametrize(("dtype", "most"), [(FP8, 1 / 16), (INT8, 1 / 254)])
def test_a_weight_is_off_by_half_a_step(dtype: torch.dtype, most: float) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    found = quantize(weight.bfloat16(), dtype).dequantized()
    exact = weight.bfloat16().float()
    # FP8 has steps in proportion to a value, INT8 to the largest of its row.
    largest = exact.abs() if dtype == FP8 else exact.abs().amax(1, keepdim=True)
    assert ((found - exact).abs() <= most * largest + 1e-4).all()
    assert not found[3].any()
    assert torch.equal(found.abs().amax(1), exact.abs().amax(1)) or dtype == FP8


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_matrix_is_its_values_times_the_scale_of_their_row(dtype: torch.dtype) -> None:
    weight = drawn(8)
    matrix = quantize(weight, dtype)
    assert torch.equal(matrix.dequantized(), matrix.values.float() * matrix.scales[:, None])
    assert dequantized(weight) is weight
    assert (matrix.dequantized() - weight).abs().max() < weight.abs().max() / 16


def test_without_memory_a_matrix_has_shapes_alone() -> None:
    matrix = quantize(torch.empty(6, 32, device="meta"), FP8)
    assert matrix.values.is_meta and matrix.scales.is_meta
    assert (matrix.shape, matrix.dtype, matrix.scales.shape) == ((6, 32), FP8, (6,))


# ---------------------------------------------------------------- spread matrices


def test_a_spread_matrix_is_dequantised_in_its_own_columns() -> None:
    weight = drawn(40)
    weight[:, 5] *= 30.0
    matrix = quantize(weight, INT8, 32)
    assert (matrix.spread, matrix.shape) == (32, weight.shape)
    found = matrix.dequantized()
    # Each block has steps of its largest value, which the large column spreads over all of them.
    largest = weight.abs().amax(1, keepdim=True)
    assert ((found - weight).abs() <= largest / 127).all()
    plain = quantize(weight, INT8).dequantized()
    assert (found - weight).norm() < 0.5 * (plain - weight).norm()


def test_parts_are_spread_alike_if_their_inputs_may_be() -> None:
    parts = [drawn(4).bfloat16(), quantize(drawn(6, seed=1), FP8)]
    found = in_one_format(parts, "int8_hadamard", spreads=True)
    assert isinstance(found, QuantizedMatrix)
    exact = torch.cat([dequantized(part).float() for part in parts])
    assert same(found, quantize(exact, INT8, 32))
    assert [part.spread for part in found.split([4, 6])] == [32, 32]
    plain = in_one_format(parts, "int8_hadamard")
    assert isinstance(plain, QuantizedMatrix) and same(plain, quantize(exact, INT8))


def test_no_part_is_spread_beside_one_with_the_values_of_a_file() -> None:
    plain, stored = drawn(4), quantize(drawn(6, seed=1), INT8)
    found = in_one_format([plain, stored], "int8_hadamard", spreads=True)
    assert isinstance(found, QuantizedMatrix)
    first, second = found.split([4, 6])
    assert same(first, quantize(plain, INT8)) and same(second, stored)


@pytest.mark.parametrize(
    ("parts", "quantization"),
    [
        ([quantize(drawn(4), INT8)], "int8_hadamard"),
        ([quantize(drawn(4), INT8)], "auto"),
        ([drawn(4)], "fp8"),
        ([drawn(4)], "int8"),
        ([torch.randn(4, 24)], "int8_hadamard"),
    ],
    ids=["a file", "a file, auto", "fp8", "int8", "no block divides the width"],
)
def test_other_parts_are_not_spread(parts: list[Matrix], quantization: Quantization) -> None:
    found = in_one_format(parts, quantization, spreads=True)
    assert isinstance(found, QuantizedMatrix) and not found.spread


def test_parts_that_are_spread_differently_are_dequantised() -> None:
    parts = [quantize(drawn(4), INT8, 32), quantize(drawn(6, seed=1), INT8)]
    found = in_one_format(parts, "auto")
    assert isinstance(found, list)
    assert torch.equal(torch.cat(found), torch.cat([part.dequantized() for part in parts]))


def test_columns_are_parted_between_blocks_or_dequantised() -> None:
    matrix = quantize(torch.cat([drawn(4), drawn(4, seed=1)], 1), INT8, 32)
    exact = matrix.dequantized()
    halves = column_parts(matrix, 2)
    assert all(isinstance(half, QuantizedMatrix) and half.spread == 32 for half in halves)
    assert torch.equal(torch.cat([dequantized(half) for half in halves], 1), exact)
    quarters = column_parts(matrix, 4)
    assert all(isinstance(quarter, Tensor) for quarter in quarters)
    assert torch.equal(torch.cat([dequantized(quarter) for quarter in quarters], 1), exact)


def test_without_memory_a_spread_matrix_has_shapes_alone() -> None:
    matrix = in_one_format([torch.empty(6, 32, device="meta")], "int8_hadamard", spreads=True)
    assert isinstance(matrix, QuantizedMatrix) and matrix.values.is_meta
    assert (matrix.shape, matrix.spread) == ((6, 32), 32)
