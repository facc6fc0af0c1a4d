"""Weight-only matrices of codes with a scale for each group of columns, as GPU kernels read them.

csrc/linear/grouped.cuh says how a matrix lies in memory. Its values are code * scale + minimum,
rounded to bfloat16, as are scales and minimums. Kernels multiply with these, or, where codes are
multiplied as integers, with values that are not rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.runtime.launch import check

RECORD_ROWS, RECORD_COLUMNS = 16, 128
"""Of a record, as in grouped.cuh."""

_STEP = 16
INT4, E2M1, TABLE, INT8, INT6 = range(5)
"""Codes, as in grouped.cuh: integers of 4 bits, floats of 4 bits (OCP Microscaling Formats, 5.3.3),
indices of 16 values, integers of 8 and of 6 bits."""

_BITS = {INT4: 4, E2M1: 4, TABLE: 4, INT8: 8, INT6: 6}

_GROUPS = dict.fromkeys(_BITS, (128, 32, 16)) | {INT6: (32, 16)}
"""Columns with a scale in common, as kernels are compiled for them; others are cut. No file has
larger ones of 6 bits."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those of 8 to 15 are negative."""

# A decoded e2m1 is its value times 2^-126.
_E2M1_UNIT = 2.0**126
_LARGEST_E2M1_SCALE = 2.0


@dataclass(frozen=True, slots=True)
class GroupedKind:
    """What a kernel is compiled for.

    Attributes:
        codes: INT4, E2M1, TABLE, INT8 or INT6.
        group: columns with a scale in common.
        minimums: whether groups have a minimum as well.
    """

    codes: int
    group: int
    minimums: bool

    @property
    def name(self) -> str:
        """The C++ type of the records."""
        return f"grouped::Records<{self.codes}, {self.group}, {str(self.minimums).lower()}>"

    @property
    def bits(self) -> int:
        """Of a code."""
        return _BITS[self.codes]

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, which few tokens may be multiplied with as such
        (grouped_planes.cuh)."""
        return self.codes in (INT4, INT6, INT8)

    @property
    def record_bytes(self) -> int:
        return self.code_bytes + RECORD_COLUMNS // self.group * (64 if self.minimums else 32)

    @property
    def code_bytes(self) -> int:
        """Of a record's codes, which precede its scales."""
        return RECORD_ROWS * RECORD_COLUMNS * self.bits // 8


KINDS = tuple(
    GroupedKind(codes, group, minimums)
    for codes in _BITS
    for group in _GROUPS[codes]
    for minimums in ((False,) if codes in (E2M1, TABLE) else (False, True))
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
        shape = (*_num_records(n, k), self.kind.record_bytes)
        check(f"{name}.records", self.records, shape, torch.uint8)

    def matrices(self, count: int) -> list[GroupedRows]:
        """So many equal ones, of which this one consists; views."""
        parts = torch.chunk(self.records, count)
        return [replace(self, records=part, n=self.n // count) for part in parts]


def can_pack(k: int, group: int) -> bool:
    """Whether kernels take a matrix of k columns with such groups."""
    return k % 8 == 0 and (group == k or group % _STEP == 0)


def empty(
    count: int, n: int, k: int, kind: GroupedKind, device: torch.device, table: Tensor | None = None
) -> GroupedRows:
    """Memory for so many matrices [n, k], one below the other; n is a multiple of RECORD_ROWS."""
    tiles, chunks = _num_records(n, k)
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
) -> GroupedRows:
    """A matrix (level(code) - zero) * scale + minimum; see `can_pack`.

    Args:
        codes: [n, k] uint8, on the device on which it is packed.
        bits: of a code: those of at most 4 are kept in 4 bits, of 5 and 6 in 6, others in 8.
        scales: [n, k / group] float32.
        minimums: as scales; None for 0.
        zero: subtracted from a code's level.
        levels: [16] float32, the values of codes of 4 bits; None if a code is its own value.
    """
    (n, k), group = codes.shape, codes.shape[1] // scales.shape[1]
    which = next(kept for kept in (INT4, INT6, INT8) if bits <= _BITS[kept])
    table, factor, middle = None, 1.0, 1 << max(bits, 4) - 1
    if levels is not None:
        which, table, factor = _table(levels, zero, scales)
        zero = middle
    kept = _kept_group(which, group)
    kind = GroupedKind(which, kept, minimums is not None or zero != middle)
    if codes.is_meta:  # torch would import its compiler to compute there, which takes seconds
        size = (*_num_records(n, k), kind.record_bytes)
        records = torch.empty(size, dtype=torch.uint8, device="meta")
        return GroupedRows(records, kind, n, k, table)
    if which == INT8:
        codes = codes - middle  # modulo 256: as signed bytes
    elif which == INT6:
        codes = codes + ((1 << _BITS[INT6] - 1) - middle)
    if zero != middle:  # numbers are distances from the middle
        moved = (middle - zero) * scales
        minimums = moved if minimums is None else minimums + moved
    factors = scales * (factor * _E2M1_UNIT if which == E2M1 else 1.0)
    parts = [_packed_codes(codes, which), _packed_scales(factors, minimums, k, kept)]
    return GroupedRows(torch.cat(parts, 2), kind, n, k, table)


def dequantized(matrix: GroupedRows) -> Tensor:
    """[n, k] bfloat16, the values that kernels multiply with; slow, for tests."""
    kind, (tiles, chunks, _) = matrix.kind, matrix.records.shape
    raw = matrix.records
    codes = _unpacked_codes(raw[:, :, : kind.code_bytes].contiguous(), kind.codes)
    words = raw[:, :, kind.code_bytes :].contiguous().view(torch.bfloat16)
    # [tiles, chunks, 8, groups, scale or minimum, upper or lower]
    parts = words.view(tiles, chunks, 8, -1, 1 + kind.minimums, 2).permute(4, 0, 5, 2, 1, 3)
    factors = parts.reshape(1 + kind.minimums, tiles * RECORD_ROWS, -1).float()
    values = _values(codes, matrix)
    wide = factors.repeat_interleave(kind.group, 2)
    values = values * wide[0] + (wide[1] if kind.minimums else 0.0)
    return values[: matrix.n, : matrix.k].to(torch.bfloat16)


def _values(codes: Tensor, matrix: GroupedRows) -> Tensor:
    """[n, k] float32 of codes without scales, as kernels decode them."""
    which = matrix.kind.codes
    if which in (INT4, INT6):
        return codes.float() - (1 << _BITS[which] - 1)
    if which == INT8:
        return codes.view(torch.int8).float()
    if which == TABLE:
        assert matrix.table is not None, "of indices"
        values = matrix.table.view(2, 16).t().contiguous().view(torch.bfloat16).flatten().float()
    else:
        positive = torch.tensor(E2M1_VALUES, device=codes.device)
        values = torch.cat([positive, -positive]) / _E2M1_UNIT
    return values[codes.long()]


def _num_records(n: int, k: int) -> tuple[int, int]:
    return -(-n // RECORD_ROWS), -(-k // RECORD_COLUMNS)


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


def _padded(matrix: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
    return F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -len(matrix) % rows), value=value)


def _in_fragments(codes: Tensor) -> Tensor:
    """[n, k] -> [tiles, chunks, steps, lanes, pairs, 2]: a lane's codes of a step."""
    tiles, chunks = _num_records(*codes.shape)
    # Rows: half, g. Columns: step, half, p, which of a pair.
    split = codes.view(tiles, 2, 8, chunks, RECORD_COLUMNS // _STEP, 2, 4, 2)
    ordered = split.permute(0, 3, 4, 2, 6, 5, 1, 7)  # step, g, p, half of columns, half of rows
    return ordered.reshape(tiles, chunks, RECORD_COLUMNS // _STEP, 32, 4, 2)


def _from_fragments(fragments: Tensor) -> Tensor:
    """The inverse of `_in_fragments`."""
    tiles, chunks = fragments.shape[:2]
    split = fragments.view(tiles, chunks, RECORD_COLUMNS // _STEP, 8, 4, 2, 2, 2)
    ordered = split.permute(0, 6, 3, 1, 2, 5, 4, 7)
    return ordered.reshape(tiles * RECORD_ROWS, chunks * RECORD_COLUMNS)


def _packed_codes(codes: Tensor, which: int) -> Tensor:
    """[tiles, chunks, bytes]."""
    fragments = _in_fragments(_padded(codes, RECORD_ROWS, RECORD_COLUMNS))
    tiles, chunks, steps = fragments.shape[:3]
    if which == INT6:
        parts = [_packed_nibbles(fragments & 15), _packed_upper_bits(fragments >> 4)]
        return torch.cat(parts, 2)
    if which == INT8:
        # Bytes 0 and 2 of a word are a pair, and 1 and 3.
        words = fragments.view(tiles, chunks, steps, 32, 2, 2, 2).transpose(5, 6)
        by_lane = words.reshape(tiles, chunks, steps // 2, 2, 32, 8).transpose(3, 4)
        return by_lane.reshape(tiles, chunks, -1)
    if which == E2M1:
        halves = _spread_e2m1(fragments)  # [.., which of a pair, bytes]
        by_lane = halves.reshape(tiles, chunks, steps // 4, 4, 32, 4).transpose(3, 4)
        return by_lane.reshape(tiles, chunks, -1)
    return _packed_nibbles(fragments)


def _packed_nibbles(fragments: Tensor) -> Tensor:
    tiles, chunks, steps = fragments.shape[:3]
    # Pair i is the nibbles i and i + 4 of a word.
    first = fragments[..., 0::2, :] | fragments[..., 1::2, :] << 4  # bytes of two pairs
    words = first.transpose(4, 5)  # [.., which of a pair, bytes]
    by_lane = words.reshape(tiles, chunks, steps // 4, 4, 32, 4).transpose(3, 4)
    return by_lane.reshape(tiles, chunks, -1)


def _unpacked_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `_packed_nibbles`."""
    tiles, chunks, _ = packed.shape
    steps = RECORD_COLUMNS // _STEP
    by_lane = packed.view(tiles, chunks, steps // 4, 32, 4, 4).transpose(3, 4)
    first = by_lane.reshape(tiles, chunks, steps, 32, 2, 2).transpose(4, 5)
    return torch.stack([first & 15, first >> 4], 5).flatten(4, 5)


def _packed_upper_bits(fragments: Tensor) -> Tensor:
    """Two bits of each code: a lane's word of two steps, as grouped.cuh says."""
    tiles, chunks, steps = fragments.shape[:3]
    # [.., pair of steps, step, lane, half of columns, half of rows, which of a pair]
    split = fragments.view(tiles, chunks, steps // 2, 2, 32, 2, 2, 2)
    total = torch.zeros_like(split[:, :, :, 0, :, :, 0])
    for step in range(2):
        for half in range(2):
            total |= split[:, :, :, step, :, :, half] << 4 * step + 2 * half
    # [.., pair of steps, lane, bytes] -> by lane
    return total.transpose(4, 5).flatten(4).transpose(2, 3).reshape(tiles, chunks, -1)


def _unpacked_upper_bits(packed: Tensor) -> Tensor:
    """The inverse of `_packed_upper_bits`."""
    tiles, chunks, _ = packed.shape
    pairs = RECORD_COLUMNS // (2 * _STEP)
    total = packed.view(tiles, chunks, 32, pairs, 2, 2).transpose(2, 3).transpose(4, 5)
    rows = [
        torch.stack([total >> 4 * step + 2 * half & 3 for half in (0, 1)], 5) for step in (0, 1)
    ]
    return torch.stack(rows, 3).reshape(tiles, chunks, 2 * pairs, 32, 4, 2)


def _spread_e2m1(fragments: Tensor) -> Tensor:
    """[..., pairs, 2] -> [..., 2, bytes]: the bits of four codes in each half of a word, as
    grouped.cuh takes them."""
    signs, rest = (fragments >> 3).to(torch.int32), (fragments & 7).to(torch.int32)
    halves = torch.zeros_like(signs[..., 0, :])
    for pair in range(3):
        halves |= signs[..., pair, :] << 15 - 3 * pair | rest[..., pair, :] << 6 - 3 * pair
    last = rest[..., 3, :]
    halves |= signs[..., 3, :] << 14 | (last >> 2) << 13 | (last & 3) << 10
    return torch.stack([halves & 255, halves >> 8], -1).to(torch.uint8)


def _gathered_e2m1(halves: Tensor) -> Tensor:
    """The inverse of `_spread_e2m1`."""
    wide = halves[..., 0].to(torch.int32) | halves[..., 1].to(torch.int32) << 8
    pairs = [(wide >> 15 - 3 * pair & 1) << 3 | (wide >> 6 - 3 * pair & 7) for pair in range(3)]
    pairs.append((wide >> 14 & 1) << 3 | (wide >> 13 & 1) << 2 | (wide >> 10 & 3))
    return torch.stack(pairs, -2).to(torch.uint8)


def _unpacked_codes(packed: Tensor, which: int) -> Tensor:
    """The inverse of `_packed_codes`: [n, k] uint8, of INT8 with signed bytes."""
    tiles, chunks, _ = packed.shape
    steps = RECORD_COLUMNS // _STEP
    if which == INT8:
        by_lane = packed.view(tiles, chunks, steps // 2, 32, 2, 8).transpose(3, 4)
        words = by_lane.reshape(tiles, chunks, steps, 32, 2, 2, 2).transpose(5, 6)
        return _from_fragments(words.reshape(tiles, chunks, steps, 32, 4, 2))
    if which == E2M1:
        by_lane = packed.view(tiles, chunks, steps // 4, 32, 4, 4).transpose(3, 4)
        words = by_lane.reshape(tiles, chunks, steps, 32, 2, 2)  # which of a pair, bytes
        return _from_fragments(_gathered_e2m1(words))
    size = RECORD_ROWS * RECORD_COLUMNS // 2
    codes = _unpacked_nibbles(packed[:, :, :size].contiguous())
    if which == INT6:
        codes = codes | _unpacked_upper_bits(packed[:, :, size:].contiguous()) << 4
    return _from_fragments(codes)


def _packed_scales(scales: Tensor, minimums: Tensor | None, k: int, group: int) -> Tensor:
    """[tiles, chunks, bytes] of scales [n, groups], and of minimums if there are."""
    n, given = scales.shape
    parts = []
    for factors in (scales, *(() if minimums is None else (minimums,))):
        wide = factors.to(torch.bfloat16)
        count = RECORD_COLUMNS // group
        if given == 1:  # of all columns
            wide = wide.expand(n, -(-k // group))
        else:
            wide = wide.repeat_interleave(k // given // group, 1)
        padded = _padded(wide, RECORD_ROWS, count)
        tiles, chunks = len(padded) // RECORD_ROWS, padded.shape[1] // count
        split = padded.view(tiles, 2, 8, chunks, count)
        parts.append(split.permute(0, 3, 2, 4, 1))  # [tiles, chunks, 8, groups, halves]
    return torch.stack(parts, 4).reshape(*parts[0].shape[:2], -1).contiguous().view(torch.uint8)
