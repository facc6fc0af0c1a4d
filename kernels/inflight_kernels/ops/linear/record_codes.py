"""Codes in records, in the order in which lanes of a warp take them, as csrc/linear/grouped.cuh has
them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.ops.linear.record_scales import COLUMNS, ROWS

STEP = 16
"""Columns of a product."""

KINDS = INT4, E2M1, TABLE, INT8, INT6 = tuple(range(5))
"""As in grouped.cuh; grouped_rows.py says what they are."""

BITS = {INT4: 4, E2M1: 4, TABLE: 4, INT8: 8, INT6: 6}
"""Of a code."""


def num_records(n: int, k: int) -> tuple[int, int]:
    """Of a matrix [n, k]: of its rows and of its columns."""
    return -(-n // ROWS), -(-k // COLUMNS)


def packed(codes: Tensor, which: int) -> Tensor:
    """[n, k] uint8, of INT8 with signed bytes -> [tiles, chunks, bytes]."""
    n, k = codes.shape
    fragments = _in_fragments(F.pad(codes, (0, -k % COLUMNS, 0, -n % ROWS)))
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
        words = _spread_e2m1(fragments)
        by_lane = words.view(tiles, chunks, steps // 4, 4, 32).transpose(3, 4).contiguous()
        return by_lane.view(torch.uint8).view(tiles, chunks, -1)
    return _packed_nibbles(fragments)


def unpacked(records: Tensor, which: int) -> Tensor:
    """The inverse of `packed`, of whole records."""
    tiles, chunks, _ = records.shape
    steps = COLUMNS // STEP
    if which == INT8:
        by_lane = records.view(tiles, chunks, steps // 2, 32, 2, 8).transpose(3, 4)
        words = by_lane.reshape(tiles, chunks, steps, 32, 2, 2, 2).transpose(5, 6)
        return _from_fragments(words.reshape(tiles, chunks, steps, 32, 4, 2))
    if which == E2M1:
        by_lane = records.view(torch.int32).view(tiles, chunks, steps // 4, 32, 4).transpose(3, 4)
        return _from_fragments(_gathered_e2m1(by_lane.reshape(tiles, chunks, steps, 32)))
    size = ROWS * COLUMNS // 2
    codes = _unpacked_nibbles(records[:, :, :size].contiguous())
    if which == INT6:
        codes = codes | _unpacked_upper_bits(records[:, :, size:].contiguous()) << 4
    return _from_fragments(codes)


def _in_fragments(codes: Tensor) -> Tensor:
    """[n, k] -> [tiles, chunks, steps, lanes, pairs, 2]: a lane's codes of a step."""
    tiles, chunks = num_records(*codes.shape)
    # Rows: half, g. Columns: step, half, p, which of a pair.
    split = codes.view(tiles, 2, 8, chunks, COLUMNS // STEP, 2, 4, 2)
    ordered = split.permute(0, 3, 4, 2, 6, 5, 1, 7)  # step, g, p, half of columns, half of rows
    return ordered.reshape(tiles, chunks, COLUMNS // STEP, 32, 4, 2)


def _from_fragments(fragments: Tensor) -> Tensor:
    """The inverse of `_in_fragments`."""
    tiles, chunks = fragments.shape[:2]
    split = fragments.view(tiles, chunks, COLUMNS // STEP, 8, 4, 2, 2, 2)
    ordered = split.permute(0, 6, 3, 1, 2, 5, 4, 7)
    return ordered.reshape(tiles * ROWS, chunks * COLUMNS)


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
    steps = COLUMNS // STEP
    by_lane = packed.view(tiles, chunks, steps // 4, 32, 4, 4).transpose(3, 4)
    first = by_lane.reshape(tiles, chunks, steps, 32, 2, 2).transpose(4, 5)
    return torch.stack([first & 15, first >> 4], 5).flatten(4, 5)


def _packed_upper_bits(fragments: Tensor) -> Tensor:
    """Two bits of each code: a lane's word of two steps, as grouped.cuh says."""
    tiles, chunks, steps = fragments.shape[:3]
    split = fragments.view(tiles, chunks, steps // 2, 2, 32, 4, 2)
    words = torch.zeros_like(split[:, :, :, 0, :, 0, 0], dtype=torch.int32)
    for step, pair, half in np.ndindex(2, 4, 2):  # in place: an output layer is large
        bits = split[:, :, :, step, :, pair, half].to(torch.int32)
        words |= bits.bitwise_left_shift_(_upper_place(step, pair, half))
    # [.., pair of steps, lane] -> by lane
    by_lane = words.transpose(2, 3).contiguous()
    return by_lane.view(torch.uint8).reshape(tiles, chunks, -1)


def _unpacked_upper_bits(packed: Tensor) -> Tensor:
    """The inverse of `_packed_upper_bits`."""
    tiles, chunks, _ = packed.shape
    pairs = COLUMNS // (2 * STEP)
    words = packed.contiguous().view(torch.int32).view(tiles, chunks, 32, pairs).transpose(2, 3)
    split = torch.empty((*words.shape[:3], 2, 32, 4, 2), dtype=torch.uint8, device=packed.device)
    for step, pair, half in np.ndindex(2, 4, 2):
        split[:, :, :, step, :, pair, half] = words >> _upper_place(step, pair, half) & 3
    return split.view(tiles, chunks, 2 * pairs, 32, 4, 2)


def _upper_place(step: int, pair: int, half: int) -> int:
    """The bit of a word from which on a code has its upper ones."""
    return (4 * pair + 4 + 2 * step + 16 * half) % 32


class _Move(NamedTuple):
    """Of some bits of a code: they lie in a word, so much higher than in the code."""

    step: int
    pair: int
    half: int
    word: int
    mask: int
    shift: int

    def to_word(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of codes, their bits in the word."""
        bits = codes & self.mask
        return bits << self.shift if self.shift >= 0 else bits >> -self.shift

    def from_word(self, words: Tensor) -> Tensor:
        """The inverse."""
        bits = words >> self.shift if self.shift >= 0 else words << -self.shift
        return bits & self.mask


@cache
def _e2m1_moves() -> tuple[_Move, ...]:
    """Of the codes of two steps to their two words, as `decode` of grouped.cuh takes them."""
    rotations = ((0, 6, 28, 4), (0, 6, 28, 26))  # of steps and pairs
    bits_of_bfloat16 = (6, 7, 8, 15)
    masks: Counter[tuple[int, int, int, int, int]] = Counter()
    for step, pair, half, bit in np.ndindex(2, 4, 2, 4):
        place = (bits_of_bfloat16[bit] + 16 * half + rotations[step][pair]) % 32
        word = step
        if pair == 3:  # in what the other pairs leave of both words
            word = 0 if place % 16 in (0, 1, 9, 10) else 1
            place -= 2 * word
        masks[step, pair, half, word, place - bit] += 1 << bit
    return tuple(_Move(*key[:4], mask, key[4]) for key, mask in masks.items())


@cache
def _e2m1_words(device: torch.device) -> Tensor:
    """[2048] int64, of each step, pair, and two codes as a byte: their bits in both words."""
    codes, words = np.arange(256, dtype=np.int64), np.zeros((2, 4, 256), dtype=np.int64)
    for move in _e2m1_moves():
        bits = move.to_word(codes >> 4 * move.half)
        words[move.step, move.pair] |= bits << 32 * move.word
    return torch.from_numpy(words.reshape(-1)).to(device)


def _spread_e2m1(fragments: Tensor) -> Tensor:
    """[tiles, chunks, steps, lanes, pairs, 2] -> [tiles, chunks, steps, lanes] int32."""
    tiles, chunks, steps = fragments.shape[:3]
    pairs = fragments[..., 0] | fragments[..., 1] << 4
    by_lane = pairs.view(tiles, chunks, steps // 2, 2, 32, 4).transpose(3, 4).flatten(4)
    places = torch.arange(0, 2048, 256, dtype=torch.int32, device=fragments.device)
    words = _e2m1_words(fragments.device)[by_lane + places].sum(-1)  # no two have the same bit
    return words.unsqueeze(-1).view(torch.int32).transpose(3, 4).reshape(tiles, chunks, steps, 32)


def _gathered_e2m1(words: Tensor) -> Tensor:
    """The inverse of `_spread_e2m1`."""
    tiles, chunks, steps = words.shape[:3]
    split = words.view(tiles, chunks, steps // 2, 2, 32)
    codes = torch.zeros((*split.shape, 4, 2), dtype=torch.uint8, device=words.device)
    for move in _e2m1_moves():
        bits = move.from_word(split[:, :, :, move.word])
        codes[:, :, :, move.step, :, move.pair, move.half] |= bits.to(torch.uint8)
    return codes.view(tiles, chunks, steps, 32, 4, 2)
