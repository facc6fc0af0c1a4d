"""Matrices of codes with a scale for each group of columns are what their formula says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix, concatenated, in_one_kind
from inflight.models.quantization.matrix import (
    column_parts,
    dequantized,
    in_one_format,
    row_parts,
)
from inflight_kernels.ops.linear.record_scales import Units

META = torch.device("meta")


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


def in_units(rows: int, group: int = 32, seed: int = 0, **parts: object) -> GroupedMatrix:
    """[rows, 512] with two units in a row, and minimums unless there is a zero."""
    generator = torch.Generator().manual_seed(seed)
    units = [torch.rand(rows, 2, generator=generator) + 0.5 for _ in range(2)]
    scales, minimums = (
        torch.randint(1, 64, (rows, 512 // group), generator=generator)
        * one.repeat_interleave(256 // group, 1)
        for one in units
    )
    drawn_codes = drawn(rows, 512, group, seed).codes
    if "zero" in parts:
        return GroupedMatrix(drawn_codes, 6, scales, units=Units(units[0], None), **parts)  # type: ignore[arg-type]
    return GroupedMatrix(drawn_codes, 4, scales, minimums, units=Units(*units))


def check_units(matrix: GroupedMatrix) -> None:
    """Scales and minimums are multiples by integers."""
    assert matrix.units is not None
    pairs = [(matrix.scales, matrix.units.scales), (matrix.minimums, matrix.units.minimums)]
    for numbers, units in pairs:
        assert (numbers is None) == (units is None)
        if numbers is not None and units is not None:
            assert len(units) == len(numbers)
            multiples = numbers / units.repeat_interleave(numbers.shape[1] // units.shape[1], 1)
            assert torch.allclose(multiples, multiples.round(), atol=1e-4)


def test_units_stay_with_their_rows_and_columns() -> None:
    matrix = in_units(6)
    parts = [*matrix.split([2, 4]), *matrix.column_parts(2), matrix.rows(torch.tensor([5, 0]))]
    for part in [*parts, concatenated(matrix.split([3, 3])), matrix.to(torch.device("cpu"))]:
        check_units(part)
    # A quarter of the columns begins within those of a unit.
    assert [part.units for part in matrix.column_parts(4)] == [None] * 4
    some = concatenated([matrix, dataclasses.replace(matrix, units=None)])
    assert some.units is None
    narrow = dataclasses.replace(matrix, units=Units(torch.ones(6, 4), torch.ones(6, 4)))
    assert concatenated([matrix, narrow]).units is None


def test_units_of_different_kinds_are_those_of_one() -> None:
    """As GGUF files mix Q4_K and Q6_K: a zero becomes a minimum, an integer times its unit."""
    joined = in_one_kind([in_units(3, 32), in_units(2, 16, seed=1, zero=32)])
    assert joined is not None and joined.minimums is not None
    check_units(joined)
    shaped = in_one_kind([in_units(3, 32).to(META), in_units(2, 16, seed=1, zero=32).to(META)])
    assert shaped is not None and shaped.units is not None and joined.units is not None
    assert shaped.units.scales.shape == joined.units.scales.shape
    assert shaped.units.minimums is not None
    # Both a zero and a minimum are no multiple of one unit.
    both = dataclasses.replace(in_units(2), zero=3)
    assert in_one_kind([both, in_units(2, 16, zero=32)]).units is None  # type: ignore[union-attr]


def test_only_matrices_of_one_kind_are_joined() -> None:
    first, same = drawn(2, 64, 32, zero=8), drawn(4, 64, 32, seed=1, zero=8)
    assert first.kind == same.kind
    for other in (
        drawn(2, 64, 16, zero=8),
        drawn(2, 64, 32),
        drawn(2, 64, 32, zero=8, columns=torch.arange(64)),
    ):
        assert first.kind != other.kind


def powers(rows: int, count: int, seed: int) -> Tensor:
    """Scales with which sums and products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-4, 3, (rows, count), generator=generator)


def as_q4_k(rows: int, seed: int) -> GroupedMatrix:
    """4 bits with minimums, as a GGUF file has most matrices; its formula is in ggml-quants.c."""
    scales, minimums = powers(rows, 8, seed), -3 * powers(rows, 8, seed + 1)
    return dataclasses.replace(drawn(rows, 256, 32, seed, minimums=minimums), scales=scales)


def as_q6_k(rows: int, seed: int) -> GroupedMatrix:
    """6 bits with a zero, as it has those that matter most."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 64, (rows, 256), dtype=torch.uint8, generator=generator)
    return GroupedMatrix(codes, 6, powers(rows, 16, seed), zero=32)


def test_matrices_of_different_kinds_have_the_same_values_in_one() -> None:
    parts = [as_q4_k(4, 1), as_q6_k(2, 3), as_q4_k(3, 5)]
    whole = in_one_kind(parts)
    assert whole is not None
    assert (whole.bits, whole.group, whole.zero) == (6, 16, 0)
    assert whole.minimums is not None and whole.minimums.shape == whole.scales.shape == (9, 16)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_matrices_of_one_kind_stay_in_it() -> None:
    for make in (as_q4_k, as_q6_k):
        whole = in_one_kind([make(4, 1), make(2, 3)])
        assert whole is not None and whole.kind == make(4, 1).kind
    levels = torch.linspace(-1, 1, 16)
    whole = in_one_kind([drawn(2, 64, 32, seed, levels=levels) for seed in (1, 2)])
    assert whole is not None and whole.levels is levels


def test_groups_that_do_not_divide_one_another_are_cut() -> None:
    parts = [
        dataclasses.replace(drawn(2, 96, group), scales=powers(2, 96 // group, group))
        for group in (48, 32)
    ]
    whole = in_one_kind(parts)
    assert whole is not None and whole.group == 16
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


@pytest.mark.parametrize(
    "other",
    [{"levels": torch.linspace(-1, 1, 16)}, {"columns": torch.arange(64).flip(0)}],
    ids=["levels", "columns"],
)
def test_levels_and_columns_are_in_one_kind_only_if_all_have_the_same(
    other: dict[str, Any],
) -> None:
    one, plain = drawn(2, 64, 32, **other), drawn(2, 64, 32, zero=8)
    assert in_one_kind([one, plain]) is None
    assert in_one_kind([plain, one]) is None
    ((name, values),) = other.items()
    moved = {name: values.roll(1)}
    changed = drawn(2, 64, 32, 1, **moved)
    assert in_one_kind([one, changed]) is None


def test_without_memory_matrices_of_different_kinds_have_the_shapes_of_one() -> None:
    parts = [as_q4_k(4, 1), as_q6_k(2, 3)]
    kept, shaped = (
        in_one_kind(parts),
        in_one_kind([part.to(torch.device("meta")) for part in parts]),
    )
    assert kept is not None and shaped is not None and shaped.codes.is_meta
    assert shaped.kind == kept.kind and shaped.shape == kept.shape
    assert shaped.minimums is not None and shaped.minimums.shape == shaped.scales.shape
    assert shaped.scales.shape == kept.scales.shape


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
