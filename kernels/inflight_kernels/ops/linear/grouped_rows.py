"""Weight-only matrices of codes with a scale for each group of columns, as GPU kernels read them.

csrc/linear/grouped.cuh says how a matrix lies in memory. Its values are code * scale + minimum,
rounded to bfloat16, as are scales and minimums. Kernels multiply with these, or, where codes are
multiplied before their scales, with values that are not rounded. Scales and minimums of GGUF's K
types are kept as they are in the file: integers of 8 bits times a unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight_kernels.ops.linear import record_codes, record_scales
from inflight_kernels.ops.linear.record_scales import Multiples, Units
from inflight_kernels.runtime.launch import check

RECORD_ROWS, RECORD_COLUMNS = record_scales.ROWS, record_scales.COLUMNS
"""Of a record, as in grouped.cuh."""

INT4, E2M1, TABLE, INT8, INT6 = record_codes.KINDS
"""Codes, as in grouped.cuh: integers of 4 bits, floats of 4 bits (OCP Microscaling Formats, 5.3.3),
indices of 16 values, integers of 8 and of 6 bits."""

_GROUPS = dict.fromkeys(record_codes.BITS, (128, 32, 16)) | {INT6: (32, 16)}
"""Columns with a scale in common, as kernels are compiled for them; others are cut. No file has
larger ones of 6 bits."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those of 8 to 15 are negative."""

# A decoded e2m1 is its value times 2^-126.
_E2M1_UNIT = 2.0**126
_LARGEST_E2M1_SCALE = 2.0

# With units, decoded codes are themselves times 2^-130 and 2^-132, and scales have the inverse.
_LARGEST_BFLOAT16 = (2 - 2**-7) * 2.0**127
_LARGEST_SCALES = {INT4: _LARGEST_BFLOAT16 * 2.0**-130, INT6: _LARGEST_BFLOAT16 * 2.0**-132}


@dataclass(frozen=True, slots=True)
class GroupedKind:
    """What a kernel is compiled for.

    Attributes:
        codes: INT4, E2M1, TABLE, INT8 or INT6.
        group: columns with a scale in common.
        minimums: whether groups have a minimum as well.
        units: whether scales and minimums are integers of 8 bits times a unit of a row's
            RECORD_COLUMNS columns, in float16.
    """

    codes: int
    group: int
    minimums: bool
    units: bool = False

    @property
    def name(self) -> str:
        """The C++ type of the records."""
        flags = f"{self.minimums}, {self.units}".lower()
        return f"grouped::Records<{self.codes}, {self.group}, {flags}>"

    @property
    def bits(self) -> int:
        """Of a code."""
        return record_codes.BITS[self.codes]

    @property
    def zero(self) -> int:
        """The code of 4 or 6 bits that stands for 0 where there is no minimum."""
        return 0 if self.units and self.minimums else 1 << self.bits - 1

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, which few tokens may be multiplied with as such
        (grouped_planes.cuh)."""
        return self.codes in (INT4, INT6, INT8)

    @property
    def record_bytes(self) -> int:
        factors = RECORD_ROWS * (2 if self.minimums else 1)
        groups = RECORD_COLUMNS // self.group
        return self.code_bytes + factors * (groups + 2 if self.units else 2 * groups)

    @property
    def code_bytes(self) -> int:
        """Of a record's codes, which precede its scales."""
        return RECORD_ROWS * RECORD_COLUMNS * self.bits // 8


_IN_UNITS = (
    GroupedKind(INT4, 16, minimums=True, units=True),  # Q2_K, Q3_K
    GroupedKind(INT4, 32, minimums=True, units=True),  # Q4_K
    GroupedKind(INT6, 32, minimums=True, units=True),  # Q5_K
    GroupedKind(INT6, 16, minimums=False, units=True),  # Q6_K
    GroupedKind(INT6, 16, minimums=True, units=True),  # of Q4_K or Q5_K and Q6_K
)

KINDS = (
    *(
        GroupedKind(codes, group, minimums)
        for codes in record_codes.BITS
        for group in _GROUPS[codes]
        for minimums in ((False,) if codes in (E2M1, TABLE) else (False, True))
    ),
    *_IN_UNITS,
)
"""All that kernels are compiled for."""


BOX_TILES = 4
"""Tiles of 16 rows whose records Hopper's TMA copies at once, as in grouped_hopper.cuh."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """A matrix [n, k], or several of them one below the other.

    Attributes:
        records: [n / 16, k / 128, bytes] uint8, both rounded up.
        kind: of its codes.
        n, k: of the matrix.
        table: [32] uint8, the values of TABLE codes in bfloat16, all lower bytes first.
    """

    records: Tensor
    kind: GroupedKind
    n: int
    k: int
    table: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self.records.nbytes

    def check(self, name: str, n: int, k: int) -> None:
        """Check it as an operand of a kernel.

        Raises:
            ValueError: with the name of the operand, what it is and what is expected.
        """
        if (self.n, self.k) != (n, k):
            raise ValueError(f"{name} is [{self.n}, {self.k}]; expected [{n}, {k}]")
        shape = (*record_codes.num_records(n, k), self.kind.record_bytes)
        check(f"{name}.records", self.records, shape, torch.uint8)

    def matrices(self, count: int) -> list[GroupedRows]:
        """So many equal ones, of which this one consists; views."""
        parts = torch.chunk(self.records, count)
        return [replace(self, records=part, n=self.n // count) for part in parts]


def can_pack(k: int, group: int) -> bool:
    """Whether kernels take a matrix of k columns with such groups."""
    return k % 8 == 0 and (group == k or group % record_codes.STEP == 0)


def empty(
    count: int, n: int, k: int, kind: GroupedKind, device: torch.device, table: Tensor | None = None
) -> GroupedRows:
    """Memory for so many matrices [n, k], one below the other; n is a multiple of RECORD_ROWS."""
    tiles, chunks = record_codes.num_records(n, k)
    records = torch.empty(
        count * tiles, chunks, kind.record_bytes, dtype=torch.uint8, device=device
    )
    return GroupedRows(records, kind, count * n, k, table)


def pack(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    minimums: Tensor | None = None,
    zero: int = 0,
    levels: Tensor | None = None,
    units: Units | None = None,
) -> GroupedRows:
    """A matrix (level(code) - zero) * scale + minimum; see `can_pack`.

    Args:
        codes: [n, k] uint8, on the device on which it is packed.
        bits: of a code: those of at most 4 are kept in 4 bits, of 5 and 6 in 6, others in 8.
        scales: [n, k / group] float32.
        minimums: as scales; None for 0.
        zero: subtracted from a code's level.
        levels: [16] float32, the values of codes of 4 bits; None if a code is its own value.
        units: of scales and minimums, which are kept as integers if kernels take them; None if
            there are none.
    """
    (n, k), group = codes.shape, codes.shape[1] // scales.shape[1]
    which = next(kept for kept in (INT4, INT6, INT8) if bits <= record_codes.BITS[kept])
    table, factor, middle = None, 1.0, 1 << max(bits, 4) - 1
    if levels is not None:
        which, table, factor = _table(levels, zero, scales)
        zero = middle
    kept = _kept_group(which, group)
    kind = GroupedKind(which, kept, minimums is not None or zero != middle)
    multiples = None
    if units is not None and replace(kind, units=True) in KINDS:
        multiples = _multiples(scales, minimums, zero, units, kind, k)
        kind = replace(kind, units=multiples is not None)
    if codes.is_meta:  # torch would import its compiler to compute there, which takes seconds
        size = (*record_codes.num_records(n, k), kind.record_bytes)
        records = torch.empty(size, dtype=torch.uint8, device="meta")
        return GroupedRows(records, kind, n, k, table)
    if which == INT8:
        codes = codes - middle  # modulo 256: as signed bytes
    elif which == INT6 and kind.zero:
        codes = codes + (kind.zero - middle)
    parts = [record_codes.packed(codes, which)]
    if multiples is not None:
        parts.append(record_scales.packed(multiples.integers, k, kept))
        parts.append(record_scales.packed(multiples.units, k, RECORD_COLUMNS))
    else:
        if zero != middle:  # numbers are distances from the middle
            moved = (middle - zero) * scales
            minimums = moved if minimums is None else minimums + moved
        factors = scales * (factor * _E2M1_UNIT if which == E2M1 else 1.0)
        numbers = [one.to(torch.bfloat16) for one in (factors, minimums) if one is not None]
        parts.append(record_scales.packed(numbers, k, kept))
    return GroupedRows(torch.cat(parts, 2), kind, n, k, table)


def _multiples(
    scales: Tensor, minimums: Tensor | None, zero: int, units: Units, kind: GroupedKind, k: int
) -> Multiples | None:
    """The scales of a matrix, and the minimums of codes that count from 0 if the kind has any; None
    if kernels do not take them as such."""
    if kind.minimums and minimums is None:
        minimums, units = -zero * scales, Units(units.scales, -zero * units.scales)
    elif kind.minimums and zero:
        return None
    largest = _LARGEST_SCALES[kind.codes]
    return record_scales.multiples(scales, minimums, units, k, largest)


def without_units(matrix: GroupedRows) -> GroupedRows:
    """The same matrix with scales in bfloat16."""
    kind = replace(matrix.kind, units=False)
    if kind == matrix.kind:
        return matrix
    factors = _factors(matrix)
    if kind.minimums:  # codes count from the middle
        factors[1] += kind.zero * factors[0]
    columns = matrix.records.shape[1] * RECORD_COLUMNS
    numbers = record_scales.packed(list(factors.to(torch.bfloat16)), columns, kind.group)
    records = torch.cat([matrix.records[:, :, : kind.code_bytes], numbers], 2)
    return GroupedRows(records, kind, matrix.n, matrix.k)


def dequantized(matrix: GroupedRows, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[n, k], the values that kernels multiply with, which some do not round to bfloat16; slow, for
    tests."""
    kind = matrix.kind
    codes = record_codes.unpacked(matrix.records[:, :, : kind.code_bytes].contiguous(), kind.codes)
    factors = _factors(matrix).to(torch.bfloat16).float().repeat_interleave(kind.group, 2)
    values = _values(codes, matrix) * factors[0] + (factors[1] if kind.minimums else 0.0)
    return values[: matrix.n, : matrix.k].to(dtype)


def _factors(matrix: GroupedRows) -> Tensor:
    """Scales, and minimums if there are, [1 or 2, rows, groups] float32, of whole records."""
    kind = matrix.kind
    raw, count = matrix.records[:, :, kind.code_bytes :], 1 + kind.minimums
    if not kind.units:
        return record_scales.unpacked(raw, count, torch.bfloat16)
    size = 2 * RECORD_ROWS * count
    integers = record_scales.unpacked(raw[:, :, :-size], count, torch.int8)
    units = record_scales.unpacked(raw[:, :, -size:], count, torch.float16)
    return integers * units.repeat_interleave(RECORD_COLUMNS // kind.group, 2)


def _values(codes: Tensor, matrix: GroupedRows) -> Tensor:
    """[n, k] float32 of codes without scales, as kernels decode them."""
    which = matrix.kind.codes
    if which in (INT4, INT6):
        return codes.float() - matrix.kind.zero
    if which == INT8:
        return codes.view(torch.int8).float()
    if which == TABLE:
        assert matrix.table is not None, "of indices"
        values = matrix.table.view(2, 16).t().contiguous().view(torch.bfloat16).flatten().float()
    else:
        positive = torch.tensor(E2M1_VALUES, device=codes.device)
        values = torch.cat([positive, -positive]) / _E2M1_UNIT
    return values[codes.long()]


def _kept_group(codes: int, group: int) -> int:
    """The largest group that kernels are compiled for of which it is a multiple; the largest of all
    for a group of all columns."""
    return next((one for one in _GROUPS[codes] if group % one == 0), _GROUPS[codes][0])


def _table(levels: Tensor, zero: int, scales: Tensor) -> tuple[int, Tensor | None, float]:
    """E2M1 or TABLE for these levels, the table of the latter, and what multiplies scales."""
    values = levels.to(torch.float32).cpu() - zero
    positive = torch.tensor(E2M1_VALUES)
    factor = float(values[7] / positive[7])
    is_multiple = torch.equal(values, factor * torch.cat([positive, -positive]))
    if is_multiple and math.log2(abs(factor) or 1.5).is_integer():
        largest = 0.0 if scales.is_meta else float(scales.abs().amax()) * factor
        if largest <= _LARGEST_E2M1_SCALE:
            return E2M1, None, factor
    raw = values.to(torch.bfloat16).view(torch.uint8).view(16, 2).t().contiguous()
    return TABLE, raw.flatten().to(scales.device), 1.0
