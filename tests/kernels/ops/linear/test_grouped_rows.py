"""Matrices of codes with scales of groups in records are what their formula says; no GPU needed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import (
    BOX_TILES,
    E2M1,
    E2M1_VALUES,
    INT4,
    INT6,
    INT8,
    KINDS,
    RECORD_COLUMNS,
    RECORD_ROWS,
    TABLE,
    GroupedKind,
    GroupedRows,
    can_pack,
    dequantized,
    pack,
    without_units,
)
from inflight_kernels.ops.linear.record_scales import Units
from inflight_kernels.runtime.recording import record_launches
from mma_fragments import LANES, left

HEADER = (Path(grouped_rows.__file__).parents[2] / "csrc/linear/grouped.cuh").read_text()
E2M1_LEVELS = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
# Of NF4 (arXiv:2305.14314, appendix E), rounded.
NF4_LEVELS = torch.tensor(
    [
        *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
        *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0),
    ]
)
BITS = {INT4: 4, E2M1: 4, TABLE: 4, INT8: 8, INT6: 6}
LEVELS = {INT4: None, INT6: None, INT8: None, E2M1: E2M1_LEVELS, TABLE: NF4_LEVELS}

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
IN_UNITS = [kind for kind in KINDS if kind.units]
each_without_units = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.units], ids=lambda kind: kind.name
)
each_in_units = pytest.mark.parametrize("kind", IN_UNITS, ids=lambda kind: kind.name)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_scales(seed: int, *shape: int) -> Tensor:
    """Between 0.1 and 1.9: those of E2M1 are at most 2."""
    return 0.1 + 1.8 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def random_codes(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)


def packed(
    kind: GroupedKind, n: int, k: int, group: int | None = None
) -> tuple[GroupedRows, Tensor]:
    """A matrix of this kind, and the values [n, k] that kernels multiply with."""
    bits, levels, group = BITS[kind.codes], LEVELS[kind.codes], group or kind.group
    codes, middle = random_codes(n, k, bits), 1 << bits - 1
    if kind.units:
        return packed_in_units(kind, codes)
    scales = drawn_scales(1, n, k // group)
    minimums = drawn(2, n, k // group) if kind.minimums else None
    zero = 0 if levels is not None else 3 if kind.minimums else middle
    found = pack(codes, bits, scales, minimums, zero, levels)
    return found, expected(codes, bits, scales, minimums, zero, levels)


def drawn_multiples(seed: int, n: int, k: int, group: int) -> tuple[Tensor, Tensor]:
    """Integers of 8 bits [n, k / group] times units, and the units [n, k / 128]."""
    generator = torch.Generator().manual_seed(seed)
    units = (drawn_scales(seed, n, k // RECORD_COLUMNS) / 4096).half().float()
    integers = torch.randint(-128, 128, (n, k // group), generator=generator)
    return integers * units.repeat_interleave(RECORD_COLUMNS // group, 1), units


def packed_in_units(kind: GroupedKind, codes: Tensor) -> tuple[GroupedRows, Tensor]:
    """Codes of a matrix without minimums count from the middle, of others from 0; numbers are
    rounded as others are."""
    bits, zero = kind.bits, 0 if kind.minimums else 1 << kind.bits - 1
    scales, of_scales = drawn_multiples(1, *codes.shape, kind.group)
    minimums, of_minimums = drawn_multiples(2, *codes.shape, kind.group)
    found = pack(
        codes,
        bits,
        scales,
        minimums if kind.minimums else None,
        zero,
        units=Units(of_scales, of_minimums if kind.minimums else None),
    )
    wide, low = (
        one.bfloat16().double().repeat_interleave(kind.group, 1)
        for one in (scales, minimums * kind.minimums)
    )
    return found, ((codes.double() - zero) * wide + low).bfloat16()


def expected(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    minimums: Tensor | None = None,
    zero: int = 0,
    levels: Tensor | None = None,
) -> Tensor:
    """(level - zero) * scale + minimum in float64. Numbers without levels are distances from the
    middle, and what is left of zero is part of the minimum; scales, minimums and the value are
    rounded to bfloat16."""
    group = codes.shape[1] // scales.shape[1]
    if levels is not None:
        numbers, rest = levels.bfloat16().double()[codes.long()], 0
    else:
        middle = 1 << max(bits, 4) - 1
        numbers, rest = codes.double() - middle, middle - zero
    added = rest * scales + (0 if minimums is None else minimums)
    wide, low = (one.bfloat16().double().repeat_interleave(group, 1) for one in (scales, added))
    return (numbers * wide + low).bfloat16()


# ---------------------------------------------------------------- values


@each_kind
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 384), (32, 256)])
def test_values_are_those_of_the_formula(kind: GroupedKind, n: int, k: int) -> None:
    found, values = packed(kind, n, k)
    assert (found.kind, found.n, found.k) == (kind, n, k)
    assert torch.equal(dequantized(found), values)


@each_without_units
def test_rounding_is_all_that_changes_values(kind: GroupedKind) -> None:
    bits, levels = BITS[kind.codes], LEVELS[kind.codes]
    codes, zero = random_codes(32, 256, bits), 0 if levels is not None else 5
    scales = drawn_scales(3, 32, 256 // kind.group)
    minimums = drawn(4, 32, 256 // kind.group) if kind.minimums else None
    if not kind.minimums and levels is None:
        zero = 1 << bits - 1
    numbers = codes.double() if levels is None else levels.double()[codes.long()]
    wide = scales.double().repeat_interleave(kind.group, 1)
    low = torch.zeros_like(wide)
    if minimums is not None:
        low = minimums.double().repeat_interleave(kind.group, 1)
    exact = (numbers - zero) * wide + low
    middle = zero if levels is not None else 1 << bits - 1
    # Each number that is rounded to 8 bits changes by 2^-8 of itself at most.
    factors = 2 if kind.codes == TABLE else 1  # scales, and levels of a table
    product = factors * ((numbers - middle) * wide).abs()
    summand = ((middle - zero) * wide + low).abs()
    bound = 1.01 * 2.0**-8 * (product + summand + exact.abs())
    found = dequantized(pack(codes, bits, scales, minimums, zero, levels)).double()
    assert ((found - exact).abs() <= bound).all()


@each_without_units
@pytest.mark.parametrize(("n", "k"), [(5, 16), (24, 144), (17, 240), (1, 400)])
def test_rows_and_columns_that_fill_no_record_are_padded_with_scales_of_0(
    kind: GroupedKind, n: int, k: int
) -> None:
    group = kind.group if k % kind.group == 0 else 16
    found, values = packed(kind, n, k, group)
    assert found.kind == GroupedKind(kind.codes, min(group, kind.group), kind.minimums)
    tiles, chunks = -(-n // RECORD_ROWS), -(-k // RECORD_COLUMNS)
    assert found.records.shape == (tiles, chunks, found.kind.record_bytes)
    rows, columns = tiles * RECORD_ROWS, chunks * RECORD_COLUMNS
    whole = dequantized(GroupedRows(found.records, found.kind, rows, columns, found.table))
    assert torch.equal(whole[:n, :k], values)
    assert torch.equal(dequantized(found), values)
    # Groups end where the matrix does.
    assert whole[n:].count_nonzero() == whole[:, k:].count_nonzero() == 0


@pytest.mark.parametrize("kind", [INT4, INT6, INT8, E2M1, TABLE])
def test_groups_are_cut_to_those_that_kernels_take(kind: int) -> None:
    for group, kept in ((64, 32), (96, 32), (48, 16), (256, 128), (128, 128)):
        wanted = GroupedKind(kind, min(kept, 32) if kind == INT6 else kept, False)
        assert wanted in KINDS
        found, values = packed(wanted, 16, 2 * group, group)
        assert found.kind == wanted
        assert torch.equal(dequantized(found), values)


@pytest.mark.parametrize("k", [24, 40, 200, 1000])
@pytest.mark.parametrize("minimums", [False, True])
def test_a_scale_of_all_columns_suits_any_multiple_of_8(k: int, minimums: bool) -> None:
    """As compressed-tensors has it with the strategy `channel`."""
    for codes, most in ((INT4, 128), (INT8, 128), (INT6, 32)):
        found, values = packed(GroupedKind(codes, 128, minimums), 24, k, k)
        assert found.kind == GroupedKind(codes, min(_group_of_all(k), most), minimums)
        assert torch.equal(dequantized(found), values)


def _group_of_all(k: int) -> int:
    return next((group for group in (128, 32, 16) if k % group == 0), RECORD_COLUMNS)


def test_groups_that_kernels_take() -> None:
    assert all(can_pack(4096, group) for group in (16, 32, 64, 128, 256, 4096))
    assert can_pack(1000, 1000) and can_pack(8, 8)
    assert not can_pack(4096, 8) and not can_pack(1000, 40) and not can_pack(12, 12)


@pytest.mark.parametrize(
    ("bits", "kept"), [(3, INT4), (4, INT4), (5, INT6), (6, INT6), (7, INT8), (8, INT8)]
)
def test_codes_are_kept_in_4_6_or_8_bits(bits: int, kept: int) -> None:
    codes, scales = random_codes(16, 128, bits), drawn_scales(1, 16, 4)
    found = pack(codes, bits, scales, zero=2)
    assert found.kind == GroupedKind(kept, 32, True)
    assert torch.equal(dequantized(found), expected(codes, bits, scales, zero=2))
    without = pack(codes, bits, scales, zero=1 << max(bits, 4) - 1)
    assert without.kind == GroupedKind(found.kind.codes, 32, False)


# ---------------------------------------------------------------- integers times units


@each_in_units
def test_the_same_values_with_scales_in_bfloat16(kind: GroupedKind) -> None:
    found, _ = packed(kind, 40, 384)
    wide = without_units(found)
    assert wide.kind == replace(kind, units=False) and wide.kind in KINDS
    # A minimum of codes that count from the middle is another number, and rounded as such.
    bound = 2.0**-7 * dequantized(found).double().abs().max()
    assert (dequantized(wide).double() - dequantized(found).double()).abs().max() <= bound
    assert without_units(wide) is wide


@each_in_units
@pytest.mark.parametrize("n", [5, 24, 16])
def test_rows_that_fill_no_record_in_units_are_padded_with_zeros(kind: GroupedKind, n: int) -> None:
    found, values = packed(kind, n, 256)
    tiles = -(-n // RECORD_ROWS)
    whole = dequantized(GroupedRows(found.records, kind, tiles * RECORD_ROWS, 256))
    assert torch.equal(whole[:n], values) and whole[n:].count_nonzero() == 0


@each_in_units
def test_records_in_units_without_memory_are_as_large_as_those_with_it(kind: GroupedKind) -> None:
    found, _ = packed(kind, 40, 256)
    codes = torch.empty(40, 256, dtype=torch.uint8, device="meta")
    scales = torch.empty(40, 256 // kind.group, device="meta")
    units = torch.empty(40, 1, device="meta")
    shaped = pack(
        codes,
        kind.bits,
        scales,
        scales if kind.minimums else None,
        0 if kind.minimums else 1 << kind.bits - 1,
        units=Units(units, units if kind.minimums else None),
    )
    assert shaped.kind == kind and shaped.records.shape == found.records.shape


@pytest.mark.parametrize(("bits", "zero"), [(4, 4), (4, 0), (5, 16), (6, 8)])
def test_what_codes_count_from_becomes_a_minimum(bits: int, zero: int) -> None:
    """As Q3_K's zero, which is not in the middle of 4 bits."""
    codes = random_codes(24, 256, bits)
    scales, units = drawn_multiples(5, 24, 256, 16)
    found = pack(codes, bits, scales, zero=zero, units=Units(units, None))
    kept = INT4 if bits == 4 else INT6
    # 5 bits that count from their middle are 6 bits that do.
    assert found.kind == GroupedKind(kept, 16, minimums=(bits, zero) != (5, 16), units=True)
    wide = scales.double().repeat_interleave(16, 1)
    rounded = scales.bfloat16().double().repeat_interleave(16, 1)
    exact = (codes.double() - zero) * wide
    bound = 1.01 * 2.0**-8 * ((codes.double() * rounded).abs() + zero * wide.abs() + exact.abs())
    assert ((dequantized(found).double() - exact).abs() <= bound).all()


LARGEST = 2.0**-2  # of a scale of 4 bits, but for its last bit


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda scales, units: (scales, units), True),
        (lambda scales, units: (scales * 0, units * 0), True),
        (lambda scales, units: (scales * 1.01, units), False),  # no multiples
        (lambda scales, units: (scales * 4, units), False),  # by more than 8 bits
        (lambda scales, units: (scales * 1.0003, units * 1.0003), False),  # no float16
        (lambda scales, units: (scales * 2.0**16, units * 2.0**16), False),  # too large
        (lambda scales, units: (scales * 0, units * 0 + 60000), False),  # times 2^122 infinite
        (lambda scales, units: (scales, units.repeat_interleave(2, 1)), True),
        (lambda scales, units: (scales, units.repeat_interleave(4, 1)), False),  # within records
    ],
)
def test_what_is_no_integer_times_a_unit_stays_a_number(change: Any, is_kept: bool) -> None:
    codes = random_codes(16, 256, 4)
    scales, of_records = drawn_multiples(6, 16, 256, 32)
    units = of_records[:, :1]  # of both records
    scales = (scales / of_records.repeat_interleave(4, 1)).round() * units
    scales, units = change(scales, units)
    minimums = torch.zeros_like(scales)
    found = pack(codes, 4, scales, minimums, units=Units(units, torch.ones_like(units)))
    assert found.kind == GroupedKind(INT4, 32, minimums=True, units=is_kept)
    rounded = expected(codes, 4, scales, minimums)
    bound = 2.0**-6 * max(1e-9, float(rounded.abs().max()))
    assert (dequantized(found).double() - rounded.double()).abs().max() <= bound


def test_the_largest_scale_in_units() -> None:
    """Times 2^130 it is the largest number of bfloat16."""
    codes = random_codes(16, 128, 4)
    for scale, is_kept in ((LARGEST * (1 - 2.0**-8), True), (LARGEST, False)):
        units = torch.full((16, 1), scale / 64)
        found = pack(codes, 4, units * torch.full((16, 4), 64.0), zero=0, units=Units(units, None))
        assert found.kind.units == is_kept
        assert dequantized(found).isfinite().all()


def test_minimums_beside_a_zero_and_wide_groups_are_numbers() -> None:
    codes = random_codes(16, 256, 4)
    scales, units = drawn_multiples(7, 16, 256, 32)
    both = Units(units, units)
    assert not pack(codes, 4, scales, scales, zero=3, units=both).kind.units
    assert not pack(codes, 4, scales, scales, units=Units(units, None)).kind.units
    assert not pack(codes, 4, units, units, units=both).kind.units  # groups of 128
    assert not pack(codes, 8, scales, scales, units=both).kind.units
    assert not pack(codes, 4, scales, levels=E2M1_LEVELS, units=Units(units, None)).kind.units


# ---------------------------------------------------------------- levels


def all_codes(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Each of the 16 codes in each row, in another order; and scales."""
    row = torch.arange(16, dtype=torch.uint8).repeat(8)
    return torch.stack([row.roll(shift) for shift in range(16)]), torch.full((16, 4), scale)


def test_each_code_of_e2m1_is_its_value_with_its_sign() -> None:
    codes, scales = all_codes()
    found = pack(codes, 4, scales, levels=E2M1_LEVELS)
    assert found.kind == GroupedKind(E2M1, 32, False) and found.table is None
    values = dequantized(found)
    assert torch.equal(values, E2M1_LEVELS[codes.long()].bfloat16())
    assert torch.equal(values < 0, codes > 8)


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.0])
def test_multiples_of_e2m1_by_powers_of_2_become_e2m1(factor: float) -> None:
    """GGUF's MXFP4 doubles levels, and halves scales."""
    codes, scales = all_codes(0.75)
    found = pack(codes, 4, scales, levels=factor * E2M1_LEVELS)
    assert found.kind.codes == E2M1 and found.table is None
    assert torch.equal(dequantized(found), (0.75 * factor * E2M1_LEVELS)[codes.long()].bfloat16())


@pytest.mark.parametrize(
    ("levels", "scale", "is_e2m1"),
    [
        (E2M1_LEVELS, 2.0, True),
        (E2M1_LEVELS, 2.5, False),  # 2^126 times that is near the end of bfloat16
        (2 * E2M1_LEVELS, 1.0, True),
        (2 * E2M1_LEVELS, 1.5, False),
        (3 * E2M1_LEVELS, 0.1, False),
        (E2M1_LEVELS.abs(), 0.1, False),
        (E2M1_LEVELS.flip(0), 0.1, False),
        (NF4_LEVELS, 0.1, False),
        (torch.zeros(16), 0.1, False),
    ],
)
def test_what_is_no_e2m1_has_a_table(levels: Tensor, scale: float, is_e2m1: bool) -> None:
    codes, scales = all_codes(scale)
    found = pack(codes, 4, scales, levels=levels)
    assert found.kind == GroupedKind(E2M1 if is_e2m1 else TABLE, 32, False)
    assert (found.table is None) == is_e2m1
    assert torch.equal(dequantized(found), expected(codes, 4, scales, levels=levels))


def test_a_table_has_all_lower_bytes_first() -> None:
    codes, scales = all_codes()
    table = pack(codes, 4, scales, levels=NF4_LEVELS).table
    assert table is not None and table.shape == (32,)
    words = table[:16].to(torch.int32) | table[16:].to(torch.int32) << 8
    assert torch.equal(words.to(torch.int16).view(torch.bfloat16), NF4_LEVELS.bfloat16())


def test_zero_is_subtracted_from_levels() -> None:
    codes, scales = all_codes(0.5)
    found = pack(codes, 4, scales, zero=1, levels=NF4_LEVELS)
    assert found.kind == GroupedKind(TABLE, 32, False)
    assert torch.equal(
        dequantized(found), (0.5 * (NF4_LEVELS - 1).bfloat16())[codes.long()].bfloat16()
    )


# ---------------------------------------------------------------- memory


@each_without_units
def test_records_without_memory_are_as_large_as_those_with_it(kind: GroupedKind) -> None:
    bits, levels, n, k = BITS[kind.codes], LEVELS[kind.codes], 40, 224
    codes = random_codes(n, k, bits)
    group = 16 if kind.group > 32 else kind.group
    scales = drawn_scales(1, n, k // group)
    zero = 0 if levels is not None else 1 << bits - 1
    minimums = scales if kind.minimums else None
    kept = pack(codes, bits, scales, minimums, zero, levels)
    low = None if minimums is None else minimums.to("meta")
    shaped = pack(codes.to("meta"), bits, scales.to("meta"), low, zero, levels)
    assert shaped.records.is_meta and shaped.records.shape == kept.records.shape
    assert (shaped.kind, shaped.n, shaped.k) == (kept.kind, n, k)
    assert (shaped.table is None) == (kept.table is None)
    assert shaped.table is None or shaped.table.is_meta
    with record_launches():
        shaped.check("weight", n, k)


@each_kind
def test_matrices_one_below_the_other_are_taken_apart(kind: GroupedKind) -> None:
    found, values = packed(kind, 48, 256)
    parts = found.matrices(3)
    assert torch.equal(torch.cat([dequantized(part) for part in parts]), values)
    assert parts[1].records.data_ptr() == found.records[1:].data_ptr()
    memory = grouped_rows.empty(3, 16, 256, kind, torch.device("cpu"), found.table)
    assert (memory.n, memory.k, memory.nbytes) == (48, 256, found.nbytes)
    memory.records.copy_(found.records)
    assert torch.equal(dequantized(memory), values)


def test_sizes_are_those_of_the_kernels() -> None:
    assert re.search(rf"ROWS = {RECORD_ROWS}, COLUMNS = {RECORD_COLUMNS};", HEADER)
    codes = f"INT4 = {INT4}, E2M1 = {E2M1}, TABLE = {TABLE}, INT8 = {INT8}, INT6 = {INT6};"
    assert codes in HEADER
    for kind in KINDS:
        assert kind.record_bytes % 16 == 0
        groups = RECORD_COLUMNS // kind.group
        of_row = groups + 2 if kind.units else 2 * groups
        of_scales = RECORD_ROWS * of_row * (1 + kind.minimums)
        assert kind.record_bytes == RECORD_ROWS * RECORD_COLUMNS * BITS[kind.codes] // 8 + of_scales
        # Of Hopper's copies: two parts of vectors, and boxes that end on 128 bytes.
        assert kind.record_bytes % 32 == 0 and kind.record_bytes // 2 <= 256 * 8
        assert BOX_TILES * kind.record_bytes % 128 == 0


def test_operands_of_another_shape_are_refused_by_name() -> None:
    found = grouped_rows.empty(1, 16, 128, KINDS[0], torch.device("meta"))
    cut = GroupedRows(found.records[:, :, :-16].contiguous(), found.kind, 16, 128)
    with record_launches():
        found.check("weight", 16, 128)
        with pytest.raises(ValueError, match=r"weight is \[16, 128\]; expected \[16, 256\]"):
            found.check("weight", 16, 256)
        with pytest.raises(ValueError, match=r"weight\.records is .*1040.*expected .*1056"):
            cut.check("weight", 16, 128)


# ---------------------------------------------------------------- layout


def lane_words(found: GroupedRows) -> Any:
    """[steps, lanes, words] of the first record, as `grouped::split` takes them. Of 6 bits the
    second word is that of two steps; of e2m1 that of the other one of two."""
    kind, per_step = found.kind, 2 if found.kind.codes == INT8 else 1
    raw = found.records[0, 0, : kind.code_bytes].numpy().view(np.uint32)
    vectors = raw.reshape(-1, 32, 4).transpose(0, 2, 1)  # of 16 bytes, of a lane
    split = vectors[: 2 * per_step].reshape(8, per_step, 32).transpose(0, 2, 1)
    if kind.codes == E2M1:
        others = split.reshape(4, 2, 32, 1)[:, ::-1].reshape(8, 32, 1)
        return np.concatenate([split, others], 2)
    if kind.codes != INT6:
        return split
    upper = vectors[2].repeat(2, 0)[..., None]  # [steps, lanes, 1]
    return np.concatenate([split, upper], 2)


def rotated(words: Any, count: int) -> Any:
    return words >> np.uint32(count) | words << np.uint32((32 - count) % 32)


def decoded(kind: int, words: Any, step: int = 0) -> Any:
    """[lanes, 4, 2] of a step's words, as `grouped::decode`: pairs of numbers, or of bits of
    bfloat16."""
    if kind == INT8:
        pairs = [words[:, half] >> 8 * which & 0x00FF00FF for half in (0, 1) for which in (0, 1)]
    elif kind == E2M1:
        mask, left = np.uint32(0x81C081C0), np.uint32(0x06030603)
        word, of_both = words[:, 0], words if step % 2 == 0 else words[:, ::-1]
        fourths = (of_both[:, 0] & left) | (of_both[:, 1] << 2 & ~left)
        last = rotated(fourths, 4) if step % 2 == 0 else fourths << 6
        pairs = [one & mask for one in (word, rotated(word, 6), word << 4, last)]
    else:
        pairs = [words[:, 0] >> 4 * i & 0x000F000F for i in range(4)]
    if kind == INT6:
        uppers = [rotated(words[:, 1], 4 * i + 4 + 2 * (step % 2)) for i in range(4)]
        pairs = [
            pair | (upper & 0x00030003) << 4 for pair, upper in zip(pairs, uppers, strict=True)
        ]
    return np.stack([np.stack([pair & 0xFFFF, pair >> 16], 1) for pair in pairs], 1)


@pytest.mark.parametrize("kind", [INT4, INT6, INT8, E2M1, TABLE])
def test_lanes_find_their_codes_in_the_order_of_operands(kind: int) -> None:
    bits, levels = BITS[kind], LEVELS[kind]
    codes = random_codes(16, 128, bits)
    zero = 0 if levels is not None else 1 << bits - 1
    found = pack(codes, bits, torch.full((16, 4), 0.5), None, zero, levels)
    assert found.kind.codes == kind
    for step, words in enumerate(lane_words(found)):
        matrix = left(decoded(kind, words, step).astype(np.int64))  # type: ignore[no-untyped-call]
        wanted = codes[:, 16 * step : 16 * step + 16].numpy().astype(np.int64)
        if kind == INT8:
            wanted = wanted ^ 128  # as signed bytes
        if kind == E2M1:
            bits_of = matrix.astype(np.uint16).view(np.int16)
            values = torch.from_numpy(bits_of.copy()).view(torch.bfloat16).double() * 2.0**126
            assert torch.equal(values, E2M1_LEVELS.double()[torch.from_numpy(wanted)])
        else:
            assert (matrix == wanted).all()


def as_bytes(kind: int, first: Any, second: Any) -> Any:
    """[4, lanes] words of two steps' words, as `grouped::bytes_of`."""
    if kind == INT8:
        moved = [words.view(np.uint8).reshape(32, 2, 4) ^ 128 for words in (first, second)]
        rows = [step[:, :, [half, half + 2]] for step in moved for half in (0, 1)]
        # Byte 0 of both words, then byte 2 of both; or 1 and 3.
        return np.stack([row.transpose(0, 2, 1).reshape(32, 4).copy() for row in rows])
    words = [step[:, 0] >> 4 * half & 0x0F0F0F0F for step in (first, second) for half in (0, 1)]
    if kind == INT6:
        uppers = [rotated(first[:, 1], count) for count in (0, 4, 2, 6)]
        words = [word | more & 0x30303030 for word, more in zip(words, uppers, strict=True)]
    return np.stack([word.view(np.uint8).reshape(32, 4) for word in words])


@pytest.mark.parametrize("kind", [INT4, INT6, INT8])
def test_lanes_find_their_codes_in_the_order_of_planes(kind: int) -> None:
    """Of each 16 columns of the rows g and g + 8: 2p, 2p + 8, 2p + 1 and 2p + 9."""
    bits = BITS[kind]
    codes = random_codes(16, 128, bits)
    found = pack(codes, bits, torch.full((16, 4), 0.5), None, 1 << bits - 1)
    words = [np.ascontiguousarray(step) for step in lane_words(found)]
    for pair in range(4):
        rows = as_bytes(kind, words[2 * pair], words[2 * pair + 1])
        for lane in range(32):
            g, p = lane // 4, lane % 4
            columns = [2 * p, 2 * p + 8, 2 * p + 1, 2 * p + 9]
            for i in range(4):
                own = codes[g + 8 * (i % 2), 32 * pair + 16 * (i // 2) :]
                assert rows[i, lane].tolist() == own[columns].tolist()


@each_without_units
def test_lanes_find_the_scales_of_their_rows(kind: GroupedKind) -> None:
    found, _ = packed(kind, 16, 128)
    groups, width = 128 // kind.group, 2 if kind.minimums else 1
    factors = found.records[0, 0, -32 * groups * width :].view(torch.bfloat16).float()
    by_place = factors.view(8, groups, width, 2)
    scales = drawn_scales(1, 16, groups) * (2.0**126 if kind.codes == E2M1 else 1)
    for lane in LANES[::4]:
        g = int(lane) // 4
        for half in (0, 1):
            row = scales[g + 8 * half].bfloat16().float()
            assert torch.equal(by_place[g, :, 0, half], row)


@each_in_units
def test_lanes_find_the_integers_and_units_of_their_rows(kind: GroupedKind) -> None:
    """Lane 4g + p has the words of the groups from p * groups / 4 on, of the rows g and g + 8."""
    found, _ = packed(kind, 16, 128)
    raw, width = found.records[0, 0, kind.code_bytes :], 2 if kind.minimums else 1
    groups = 128 // kind.group
    integers = raw[: 16 * groups * width].view(torch.int8).view(32, groups // 4, width, 2)
    units = raw[16 * groups * width :].view(torch.float16).view(8, width, 2)
    for which in range(width):
        numbers, of_rows = drawn_multiples(1 + which, 16, 128, kind.group)
        wanted = numbers / of_rows
        for lane in range(32):
            g, p = lane // 4, lane % 4
            for half in (0, 1):
                row = wanted[g + 8 * half].view(4, -1)[p]
                assert torch.equal(integers[lane, :, which, half].float(), row)
                assert units[g, which, half] == of_rows[g + 8 * half, 0]
