"""The index maps of the kernels of latent attention in numpy.

The kernels need a GPU (tests/kernels/gpu); these checks do not: lanes hold the fragments of the mma
instructions, tiles are copied once, parts of a split unit cover it, and shared memory has few bank
conflicts.
"""

from __future__ import annotations

import numpy as np
import pytest

from mma_fragments import LANES, accumulators, banks, ldmatrix, left, right

KEY, RANK, KEYS, WARPS, THREADS, DEPTHS = 576, 512, 32, 8, 256, 4
PITCH = KEY + 8  # of a tile and of queries
QUARTERS = RANK // 4

rows_ = pytest.mark.parametrize("rows", [16, 32, 64])


# ---------------------------------------------------------------- copies and shared memory


def test_a_tile_is_copied_once_in_lines_of_128_bytes() -> None:
    seen = np.zeros((KEYS, KEY // 8), np.int32)
    for warp in range(WARPS):
        first = warp * (KEYS // WARPS)
        assert first // 16 == (first + KEYS // WARPS - 1) // 16, "one block of the cache"
        for i in range(KEY // 64):
            key, chunk = first + LANES // 8, LANES % 8 + 8 * i
            np.add.at(seen, (key, chunk), 1)
            for phase in LANES.reshape(4, 8):  # 16 bytes each
                places = (key[phase] * PITCH + chunk[phase] * 8) * 2
                assert len(set(banks(places, 16))) == 32
    assert (seen == 1).all()


@pytest.mark.parametrize("pitch", [PITCH, KEYS + 8])
def test_matrices_of_tiles_queries_and_weights_have_no_bank_conflicts(pitch: int) -> None:
    """An ldmatrix reads 8 rows of 16 bytes at a time."""
    assert len(set(banks(np.arange(8) * pitch * 2, 16))) == 32


def place_of_score(row: np.ndarray, key: np.ndarray) -> np.ndarray:
    return row * KEYS + (key ^ ((row & 1) << 4 | (row & 2) << 2))


@rows_
def test_scores_have_places_of_their_own_without_bank_conflicts(rows: int) -> None:
    row, key = np.divmod(np.arange(rows * KEYS), KEYS)
    assert sorted(place_of_score(row, key)) == list(range(rows * KEYS))
    for n in range(KEYS // 8):  # written as float2 of fragments, half a warp at a time
        for half in LANES.reshape(2, 16):
            places = place_of_score(half // 4, n * 8 + half % 4 * 2)
            assert len(set(banks(places * 4, 8))) == 32
    lanes = THREADS // rows
    width = min(KEYS // lanes, 4)  # read in vectors of so many
    phase = 128 // (4 * width)
    for first in range(0, KEYS // lanes, width):
        for threads in np.arange(THREADS).reshape(-1, phase):
            key = first // width * lanes * width + threads % lanes * width
            places = place_of_score(threads // lanes, key)
            assert len(set(banks(places * 4, 4 * width))) == 32


@rows_
def test_each_score_of_a_tile_has_a_thread_of_its_row(rows: int) -> None:
    lanes = THREADS // rows
    width, count = min(KEYS // lanes, 4), KEYS // lanes
    seen = np.zeros((rows, KEYS), np.int32)
    for i in range(count):
        thread = np.arange(THREADS)
        key = i // width * lanes * width + thread % lanes * width + i % width
        np.add.at(seen, (thread // lanes, key), 1)
    assert (seen == 1).all()


# ---------------------------------------------------------------- matrix fragments


@rows_
def test_warps_share_the_scores_of_a_tile(rows: int) -> None:
    row_parts = 1 if rows == 16 else 2
    key_parts = WARPS // DEPTHS // row_parts
    seen = np.zeros((DEPTHS, rows, KEYS), np.int32)
    for warp in range(WARPS):
        depth, part = warp % DEPTHS, warp // DEPTHS
        first_row = 0 if row_parts == 1 else part * rows // 2
        first_key = 0 if key_parts == 1 else part * KEYS // 2
        last_row, last_key = first_row + rows // row_parts, first_key + KEYS // key_parts
        seen[depth, first_row:last_row, first_key:last_key] += 1
    assert (seen == 1).all()


def column_of(step: int, k: np.ndarray) -> np.ndarray:
    return k % 8 // 2 * 8 + step * 4 + k // 8 * 2 + k % 2


def test_columns_of_x_and_of_a_matrix_are_in_the_same_order() -> None:
    """32 columns in two steps, x from vectors of 16 bytes: `Columns` and `column_of`."""
    rng = np.random.default_rng(1)
    x, matrix = rng.random((16, 32)), rng.random((32, 8))
    # Vectors of the tokens lane / 4 and lane / 4 + 8, in words of two columns.
    vectors = np.stack(
        [
            x[(LANES // 4 + 8 * half)[:, None], (LANES % 4 * 8)[:, None] + np.arange(8)]
            for half in range(2)
        ],
        1,
    ).reshape(32, 2, 4, 2)
    rows = column_of(LANES // 16, LANES % 16)
    loaded = ldmatrix(matrix, rows, np.zeros(32, int), transposed=True)
    total = np.zeros((32, 4))
    for step in range(2):
        a = np.stack([vectors[:, i % 2, 2 * step + i // 2] for i in range(4)], 1)
        total += accumulators(left(a) @ right(loaded[:, 2 * step : 2 * step + 2]))
    np.testing.assert_allclose(total, accumulators(x @ matrix))
    # The matrix of values is read in the same vectors as x, its rows as columns of the operand.
    rows = matrix.T[(LANES // 4)[:, None], (LANES % 4 * 8)[:, None] + np.arange(8)]
    words = rows.reshape(32, 4, 2)
    total = np.zeros((32, 4))
    for step in range(2):
        a = np.stack([vectors[:, i % 2, 2 * step + i // 2] for i in range(4)], 1)
        total += accumulators(left(a) @ right(words[:, 2 * step : 2 * step + 2]))
    np.testing.assert_allclose(total, accumulators(x @ matrix))


# ---------------------------------------------------------------- split units


@pytest.mark.parametrize("num_rows", [1, 3, 16, 20, 64])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 31, 32, 33, 128, 132, 300])
def test_parts_of_a_split_unit_cover_it_once_with_all_pieces(count: int, num_rows: int) -> None:
    places = num_rows * QUARTERS
    met = np.zeros((places, count), np.int32)
    size = -(-places // count)
    for rank in range(count):
        begin = rank * size
        end = min(begin + size, places)
        if size > THREADS // 2:
            for thread in range(THREADS):
                for first in range(begin + thread, end, 4 * THREADS):
                    for place in range(first, min(first + 4 * THREADS, end), THREADS):
                        met[place] += 1
            continue
        width = 1 << (size - 1).bit_length()
        groups = THREADS // width
        assert width * groups == THREADS and width >= size
        for thread in range(THREADS):
            place = begin + thread % width
            if place < end:
                met[place, thread // width :: groups] += 1
    assert (met == 1).all()
