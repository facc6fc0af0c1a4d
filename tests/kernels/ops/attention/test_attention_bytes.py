"""The index maps of attention_bytes.cuh and its users, reimplemented in numpy: tiles of a cache of
8 bits are copied once, and multiplied as if they were of 16 bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from cuda.core import Program, ProgramOptions

from inflight_kernels.ops.attention.dispatch import (
    HEAD_DIMS,
    HEADS_HEAD_DIMS,
    HeadsShape,
    Shape,
    candidates,
    shapes,
)
from inflight_kernels.runtime import compile as compiler
from mma_fragments import LANES, accumulators, banks, left, right, transposed

COLUMN = LANES % 4  # "j" of a fragment
ROW = LANES // 4

all_shapes = pytest.mark.parametrize(
    "shape",
    [
        *(
            shape
            for head_dim in HEAD_DIMS
            for shape in dict.fromkeys(itertools.chain(*candidates(head_dim, "Fp8")))
        ),
        *(HeadsShape(head_dim, "Fp8") for head_dim in HEADS_HEAD_DIMS),
    ],
    ids=lambda shape: f"{shape.stem}-d{shape.head_dim}-r{shape.rows}-k{shape.keys}-s{shape.stages}",
)


def copy_keys(shape: Shape | HeadsShape) -> tuple[int, int]:
    """Keys of a tile that a warp copies, and the warps that copy parts of it."""
    warps = 1 if isinstance(shape, HeadsShape) else shape.threads // 32
    return shape.keys // warps, warps


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_blocks_fit_on_all_gpus(head_dim: int) -> None:
    for shape in shapes(head_dim, 164 * 1024, "Fp8"):
        assert shape.shared_bytes <= 163 * 1024
        if head_dim <= 128:
            assert 2 * (shape.shared_bytes + 1024) <= 228 * 1024
    few, some, many = shapes(head_dim, 100 * 1024, "Fp8")
    assert max(shape.shared_bytes for shape in (few, some, many)) <= 99 * 1024
    assert few.rows == 16 < some.rows <= many.rows
    assert (few.rows, some.rows) == tuple(one.rows for one in shapes(head_dim, 100 * 1024)[:2])


def test_the_kernels_count_as_much_shared_memory() -> None:
    """The compiler compares: sources here only include those of csrc/."""
    folder = compiler._CSRC
    options = ProgramOptions(
        arch="sm_90a", std="c++17", include_path=[str(folder), *compiler._toolkit_headers()]
    )
    source = '#include "attention/attention_heads.cu"\n__global__ void none() {}\n'
    for cached, head_dim in itertools.product(("", "Fp8", "Int8"), HEAD_DIMS):
        for shape in itertools.chain(*candidates(head_dim, cached)):
            name, size = shape.type("__nv_bfloat16"), shape.shared_bytes
            source += f'static_assert({name}::SHARED_BYTES == {size}, "{head_dim}{cached}");\n'
        if head_dim in HEADS_HEAD_DIMS:
            of_heads = HeadsShape(head_dim, cached)
            name = of_heads.name("__nv_bfloat16").removeprefix("attend_heads<").removesuffix(">")
            size = of_heads.shared_bytes // of_heads.heads // of_heads.stages
            source += f'static_assert(4 * {name}::TILE == {size}, "heads {head_dim}{cached}");\n'
    Program(source, "c++", options).compile("cubin", name_expressions=("none",))


@all_shapes
def test_a_tile_is_copied_once_with_its_scales(shape: Shape | HeadsShape) -> None:
    per_warp, warps = copy_keys(shape)
    chunks, scale_chunks = shape.head_dim // 16, per_warp // 8
    pitch, end = shape.head_dim + 16, shape.keys * (shape.head_dim + 16 + 2)
    assert per_warp * chunks % 32 == 0 == per_warp % 8 and per_warp <= 16
    seen = np.zeros(2 * end, np.int32)
    assert end % 16 == 0 and end % 2 == 0
    for warp in range(warps):
        first_row = warp * per_warp
        for i in range(per_warp * chunks // 32):
            row, chunk = np.divmod(i * 32 + LANES, chunks)
            for tile in range(2):
                place = tile * end + (first_row + row) * pitch + chunk * 16
                assert not (place % 16).any()
                np.add.at(seen, place[:, None] + np.arange(16), 1)
        lanes = LANES[: 2 * scale_chunks]
        row, of_values = lanes % scale_chunks * 8, lanes // scale_chunks % 2
        place = of_values * end + shape.keys * pitch + (first_row + row) * 2
        assert not (place % 16).any()
        np.add.at(seen, place[:, None] + np.arange(16), 1)
    tiles = seen.reshape(2, end)
    rows = tiles[:, : shape.keys * pitch].reshape(2, shape.keys, pitch)
    assert (rows[..., : shape.head_dim] == 1).all() and not rows[..., shape.head_dim :].any()
    assert (tiles[:, shape.keys * pitch :] == 1).all()


@pytest.mark.parametrize("ready", [0, 1, 7, 8, 9, 15, 16, 40, 63, 64])
@pytest.mark.parametrize("per_warp", [8, 16])
def test_scales_are_copied_once_when_the_newest_keys_come_later(ready: int, per_warp: int) -> None:
    """First the keys below `ready`, then the others; those of a chunk with both come later."""
    first_keys = np.arange(0, 64, 8)
    early = (first_keys + 7 >= 0) & (first_keys + 7 < ready)
    late = (first_keys + 7 >= ready) & (first_keys + 7 < 1 << 30)
    assert (early ^ late).all()
    assert (first_keys[early] + 8 <= ready).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_sources_of_scales_are_those_of_the_layout(head_dim: int, block_size: int) -> None:
    """[G, block_size] of 2 bytes after the values, in chunks of 16 bytes of one block."""
    num_heads = 3
    begin = block_size * num_heads * head_dim
    expected = begin + 2 * np.arange(num_heads * block_size).reshape(num_heads, block_size)
    for head, key in itertools.product(range(num_heads), range(0, 4 * block_size, 8)):
        offset = key & (block_size - 1)
        source = begin + head * block_size * 2 + offset * 2
        assert source % 16 == 0
        assert (source + 2 * np.arange(8) == expected[head, offset : offset + 8]).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_reading_a_tile_has_no_bank_conflicts(head_dim: int) -> None:
    assert len(set(banks(np.arange(8) * (head_dim + 16), 16))) == 32


# ---------------------------------------------------------------- matrix fragments


def ldmatrix(tile: Any, rows: Any, columns: Any, transposed: bool = False) -> Any:
    """[32, 4, 4]: the bytes that each lane gets of four matrices of 8 rows and 16 bytes."""
    out = np.empty((32, 4, 4), tile.dtype)
    for matrix in range(4):
        source = slice(8 * matrix, 8 * matrix + 8)
        values = np.stack(
            [tile[r, c : c + 16] for r, c in zip(rows[source], columns[source], strict=True)]
        )
        pairs = values.reshape(8, 8, 2)  # elements of 16 bits
        if transposed:
            pairs = pairs.transpose(1, 0, 2)
        for element in range(2):
            out[:, matrix, 2 * element : 2 * element + 2] = pairs[ROW, 2 * COLUMN + element]
    return out


def decode(word: Any) -> Any:
    """Bytes 0 and 2, and bytes 1 and 3, of words [32, 4]."""
    return word[:, [0, 2]], word[:, [1, 3]]


def query_words(queries: Any, rows: Any, step: Any) -> Any:
    """[32, 2, 2]: QueryWords of a row of each lane."""
    four = np.stack([queries[rows, step * 16 + 4 * COLUMN + e] for e in range(4)], axis=1)
    low, high = (
        four[:, :2],
        four[:, 2:],
    )  # two words; prmt takes their lower, and their upper halves
    even = np.stack([low[:, 0], high[:, 0]], axis=1)
    odd = np.stack([low[:, 1], high[:, 1]], axis=1)
    return np.stack([even, odd], axis=1)


def query_fragment(queries: Any, step: Any) -> Any:
    """The left operand of 16 rows: registers by half of the rows, then by word."""
    halves = [query_words(queries, ROW + 8 * half, step) for half in range(2)]
    return np.stack([halves[i % 2][:, i // 2] for i in range(4)], axis=1)


def test_fragments_multiply_queries_keys_and_values() -> None:
    """One warp, 16 rows, 32 keys, 64 columns, with scales, as attention_tile.cuh does."""
    rng = np.random.default_rng(1)
    queries, keys, values = rng.random((16, 64)), rng.random((32, 64)), rng.random((32, 64))
    k_scales, v_scales = rng.random(32), rng.random(32)
    scores = np.zeros((4, 32, 4))
    for step in range(0, 4, 2):
        a = [left(query_fragment(queries, step + i)) for i in range(2)]
        for n in range(2):
            rows = n * 16 + LANES // 16 * 8 + LANES % 8
            found = ldmatrix(keys, rows, step * 16 + LANES // 8 % 2 * 16)
            for i in range(4):
                b = right(np.stack(decode(found[:, i]), axis=1))
                scores[2 * n + i // 2] += accumulators(a[i % 2] @ b)
    for n, e in itertools.product(range(4), range(4)):
        scores[n][:, e] *= k_scales[n * 8 + COLUMN * 2 + e % 2]
    expected = queries @ (keys * k_scales[:, None]).T
    for n in range(4):
        np.testing.assert_allclose(scores[n], accumulators(expected[:, 8 * n : 8 * n + 8]))
    for n, e in itertools.product(range(4), range(4)):
        scores[n][:, e] *= v_scales[n * 8 + COLUMN * 2 + e % 2]

    sums = np.zeros((8, 32, 4))
    for n in range(2):
        a = left(
            np.stack(
                [scores[2 * n + i // 2][:, 2 * (i % 2) : 2 * (i % 2) + 2] for i in range(4)], axis=1
            )
        )
        for column in range(0, 4, 2):
            rows = n * 16 + LANES % 16
            found = ldmatrix(values, rows, column * 16 + LANES // 16 * 16, transposed=True)
            for i in range(2):
                parts = zip(decode(found[:, 2 * i]), decode(found[:, 2 * i + 1]), strict=True)
                for parity, pair in enumerate(parts):
                    sums[2 * (column + i) + parity] += accumulators(a @ right(np.stack(pair, 1)))
    expected = expected @ (values * v_scales[:, None])
    stored = np.full((16, 64), np.nan)
    for half, n in itertools.product(range(2), range(0, 8, 2)):
        even, odd = (sums[n + i][:, 2 * half : 2 * half + 2] for i in range(2))
        four = (even[:, 0], odd[:, 0], even[:, 1], odd[:, 1])
        for element, column in enumerate(four):
            stored[half * 8 + ROW, n * 8 + COLUMN * 4 + element] = column
    np.testing.assert_allclose(stored, expected)


def test_fragments_multiply_keys_and_queries_turned_round() -> None:
    """One warp, 16 keys, 8 rows, 64 columns, with scales, as attention_heads.cu does."""
    rng = np.random.default_rng(1)
    queries, keys, values = rng.random((8, 64)), rng.random((16, 64)), rng.random((16, 64))
    k_scales, v_scales = rng.random(16), rng.random(16)
    scores = np.zeros((32, 4))
    for step in range(0, 4, 2):
        found = ldmatrix(keys, LANES % 16, step * 16 + LANES // 16 * 16)
        for i in range(2):
            a = np.empty((32, 4, 2))
            a[:, 0], a[:, 2] = decode(found[:, 2 * i])
            a[:, 1], a[:, 3] = decode(found[:, 2 * i + 1])
            scores += accumulators(left(a) @ right(query_words(queries, ROW, step + i)))
    for half in range(2):
        scores[:, 2 * half : 2 * half + 2] *= k_scales[ROW + 8 * half][:, None]
    expected = (keys * k_scales[:, None]) @ queries.T
    np.testing.assert_allclose(scores, accumulators(expected))
    for half in range(2):
        scores[:, 2 * half : 2 * half + 2] *= v_scales[ROW + 8 * half][:, None]

    weights = right(np.stack([transposed(scores[:, 0:2]), transposed(scores[:, 2:4])], axis=1))
    expected = (values * v_scales[:, None]).T @ expected
    written, left_behind = np.full((64, 8), np.nan), np.full((64, 8), np.nan)
    for column in range(0, 4, 2):
        found = ldmatrix(values, LANES % 16, column * 16 + LANES // 16 * 16, transposed=True)
        for i in range(2):
            a = np.empty((32, 4, 2))
            a[:, 0], a[:, 1] = decode(found[:, 2 * i])
            a[:, 2], a[:, 3] = decode(found[:, 2 * i + 1])
            sums = accumulators(left(a) @ weights)
            # To the output: four columns of one row in each lane.
            even, odd = transposed(sums[:, 0:2]), transposed(sums[:, 2:4])
            four = (even[:, 0], odd[:, 0], even[:, 1], odd[:, 1])
            for element, values_of_lane in enumerate(four):
                written[(column + i) * 16 + COLUMN * 4 + element, ROW] = values_of_lane
            # To a slot: two columns of two rows.
            for half, r in itertools.product(range(2), range(2)):
                place = (column + i) * 16 + ROW * 2 + half
                left_behind[place, COLUMN * 2 + r] = sums[:, 2 * half + r]
    np.testing.assert_allclose(written, expected)
    np.testing.assert_allclose(left_behind, expected)


# ---------------------------------------------------------------- the token's key

ROTATED_DIMS = [head_dim for head_dim in HEAD_DIMS if head_dim <= 128]


def held(row: Any) -> Any:
    """[D / 16, 2, 4, 2]: by step, half and lane of four, the two columns in a word of a HeadRow."""
    return row.reshape(-1, 4, 2, 2).transpose(0, 3, 1, 2)


def test_a_lane_has_the_columns_of_its_query_words() -> None:
    rows = np.arange(8 * 128).reshape(8, 128)
    for step in range(8):
        words = query_words(rows, ROW, step)
        for half in range(2):
            assert (words[:, half] == held(rows[0])[step, half, COLUMN] + 128 * ROW[:, None]).all()


def unpack_four(words: Any) -> Any:
    """[4, 4]: the four columns of a lane in order, from its words [2, 4, 2]."""
    even, odd = words
    return np.stack([even[:, 0], odd[:, 0], even[:, 1], odd[:, 1]], axis=1)


@pytest.mark.parametrize("head_dim", ROTATED_DIMS)
def test_a_key_is_rotated_by_the_lanes_that_have_its_pairs(head_dim: int) -> None:
    """As `Rotated` of attention_source.cuh does, which stores it for all lanes to quantise."""
    rng = np.random.default_rng(1)
    row, weight, cos, sin = rng.random((4, head_dim))
    half_dim, half_steps = head_dim // 2, head_dim // 32
    columns = 4 * np.arange(4)[:, None] + np.arange(4)  # of the first 16, by lane of four
    stored = np.full(head_dim, np.nan)
    for step in range(half_steps):
        first = step * 16 + columns
        a = unpack_four(held(row)[step]) * weight[first]
        b = unpack_four(held(row)[step + half_steps]) * weight[half_dim + first]
        stored[first] = a * cos[first] - b * sin[first]
        stored[half_dim + first] = b * cos[first] + a * sin[first]
    (x, y), c, s = np.split(row * weight, 2), cos[:half_dim], sin[:half_dim]
    np.testing.assert_array_equal(stored, np.concatenate([x * c - y * s, y * c + x * s]))


@pytest.mark.parametrize("head_dim", ROTATED_DIMS)
def test_both_kernels_that_rotate_keys_add_squares_in_the_same_order(head_dim: int) -> None:
    """In float32, so that another order gives another sum for some of the rows."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((500, head_dim)).astype(np.float32)
    half_dim, half_steps = head_dim // 2, head_dim // 32
    pairs = rows[:, :half_dim] ** 2 + rows[:, half_dim:] ** 2

    lanes = 1 << (head_dim // 16 - 1).bit_length()  # rope.cu: `GROUP`, and `warp_sum` of it
    sums = np.zeros((len(rows), lanes), np.float32)
    for column in range(8):
        sums[:, : head_dim // 16] += pairs[:, column::8]
    distance = lanes // 2
    while distance:
        sums = sums + sums[:, np.arange(lanes) ^ distance]
        distance //= 2

    words = np.stack([held(row) for row in np.concatenate([pairs, pairs], axis=1)])
    found = np.zeros((len(rows), half_steps, 4), np.float32)  # attention, by lane of four
    for turn in range(2):
        if turn:
            found = found[:, :, np.arange(4) ^ 1]
        for element, half in itertools.product(range(2), range(2)):
            found = found + words[:, :half_steps, half, :, element]
    for distance in (2, 1):
        for step in range(distance):
            if step + distance < half_steps:
                found[:, step] += found[:, step + distance]
    np.testing.assert_array_equal(found[:, 0, 1] + found[:, 0, 3], sums[:, 0])
    assert (sums[:, 0] != pairs.sum(1, dtype=np.float32)).any()


# ---------------------------------------------------------------- bytes


def bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def test_each_byte_is_decoded_exactly() -> None:
    """As kv_quantization.cuh does, with bfloat16's arithmetic, which is exact here."""
    codes = np.arange(256, dtype=np.uint32)
    upper = codes << np.uint32(8)
    widened = (upper & np.uint32(0x8000)) | (upper >> np.uint32(4) & np.uint32(0x07F0))
    e4m3 = bfloat16(widened) * bfloat16(np.array(0x7B80))
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(int)
    magnitude = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    finite = (codes & 127) != 127
    assert (e4m3 == np.where(codes & 128, -magnitude, magnitude))[finite].all()
    int8 = bfloat16(codes & 0x7F | 0x4300) - bfloat16(codes & 0x80 | 0x4300)
    assert (int8 == codes.astype(np.uint8).view(np.int8)).all()
    # As float16 without the instruction for it, and INT8 everywhere.
    halves = (upper & 0x8000 | upper >> 1 & 0x3F80).astype(np.uint16).view(np.float16)
    assert (halves * np.float16(256.0) == e4m3)[finite].all()
    raised = (codes ^ 0x80 | 0x6400).astype(np.uint16).view(np.float16)
    assert (raised - np.array(0x6480, np.uint16).view(np.float16) == int8).all()
