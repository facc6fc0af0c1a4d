"""Matrices of codes with a scale for each group of columns are what their formula says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix, concatenated
from inflight.models.quantization.matrix import (
    column_parts,
    dequantized,
    in_one_format,
    row_parts,
)


def drawn(rows: int, width: int, group: int, seed: int = 0, **parts: object) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, width // group, generator=generator)
    return GroupedMatrix(codes, 4, scales, **parts)  # type: ignore[arg-type]


def test_a_value_is_its_code_less_zero_times_the_scale_of_its_group() -> None:
    matrix = drawn(3, 64, 32, zero=8)
    values = matrix.dequantized()
    assert matrix.group == 32
    assert values[2, 33] == (float(matrix.codes[2, 33]) - 8) * matrix.scales[2, 1]


def test_levels_replace_codes_and_minimums_are_added() -> None:
    levels = torch.linspace(-1, 1, 16)
    minimums = torch.rand(3, 2)
    matrix = drawn(3, 64, 32, levels=levels, minimums=minimums)
    code = int(matrix.codes[1, 40])
    assert matrix.dequantized()[1, 40] == levels[code] * matrix.scales[1, 1] + minimums[1, 1]


def test_columns_return_to_their_places() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    plain = drawn(3, 64, 32, zero=8)
    moved = drawn(3, 64, 32, zero=8, columns=order)
    assert torch.equal(moved.dequantized()[:, order], plain.dequantized())


def test_rows_can_be_split_selected_and_joined() -> None:
    matrix = drawn(6, 64, 16, minimums=torch.rand(6, 4))
    whole = matrix.dequantized()
    parts = matrix.split([2, 4])
    assert [part.shape[0] for part in parts] == [2, 4]
    assert torch.equal(concatenated(parts).dequantized(), whole)
    index = torch.tensor([5, 0])
    assert torch.equal(matrix.rows(index).dequantized(), whole[index])
    assert torch.equal(row_parts(matrix, [2, 4])[1].dequantized(), whole[2:])  # type: ignore[union-attr]


def test_only_matrices_of_one_kind_are_joined() -> None:
    first, same = drawn(2, 64, 32, zero=8), drawn(4, 64, 32, seed=1, zero=8)
    assert first.kind == same.kind
    for other in (
        drawn(2, 64, 16, zero=8),
        drawn(2, 64, 32),
        drawn(2, 64, 32, zero=8, columns=torch.arange(64)),
    ):
        assert first.kind != other.kind


def test_without_a_kernel_they_are_dequantised() -> None:
    matrix = drawn(2, 64, 32, zero=8)
    (found,) = in_one_format([matrix], "auto")  # type: ignore[misc]
    assert torch.equal(found, dequantized(matrix))


@pytest.mark.parametrize("has_minimums", [False, True])
def test_parts_of_columns_are_those_of_the_whole(has_minimums: bool) -> None:
    codes = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    minimums = torch.randn(5, 6) if has_minimums else None
    matrix = GroupedMatrix(codes, 4, torch.rand(5, 6), minimums, zero=3)
    parts = column_parts(matrix, 3)
    assert all(isinstance(part, GroupedMatrix) and part.group == 16 for part in parts)
    assert torch.equal(torch.cat([dequantized(part) for part in parts], 1), matrix.dequantized())


@pytest.mark.parametrize("columns", [None, torch.arange(96).flip(0)], ids=["wide", "in order"])
def test_groups_that_parts_of_columns_cut_are_dequantised(columns: Tensor | None) -> None:
    group = 96 if columns is None else 16
    codes = torch.randint(0, 16, (5, 96), dtype=torch.uint8)
    matrix = GroupedMatrix(codes, 4, torch.rand(5, 96 // group), columns=columns)
    parts = column_parts(matrix, 2)
    assert torch.equal(torch.cat([dequantized(part) for part in parts], 1), matrix.dequantized())
    assert all(isinstance(part, Tensor) for part in parts)
