"""The index maps of attention_tile.cuh and attention_hopper.cu, reimplemented in numpy.

The kernels need a GPU (tests/kernels/gpu); these checks do not: lanes hold the fragments of the mma
instructions, tiles are copied once, and shared memory has no bank conflicts.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from inflight_kernels.ops.attention import attention
from inflight_kernels.ops.attention.attention import instantiations
from inflight_kernels.ops.attention.dispatch import (
    HEAD_DIMS,
    HOPPER_HEAD_DIMS,
    MAX_ROPE_TOKENS,
    Gpu,
    Heads,
    HeadsShape,
    HopperShape,
    Shape,
    candidates,
    heads_shape,
    parts,
    shapes,
)
from inflight_kernels.runtime.launch import BYTE_TYPES
from mma_fragments import LANES, accumulators, banks, ldmatrix, left, right, transposed

all_shapes = pytest.mark.parametrize(
    "shape",
    [
        shape
        for head_dim in HEAD_DIMS
        for shape in dict.fromkeys(itertools.chain(*candidates(head_dim)))
    ],
    ids=lambda shape: f"d{shape.head_dim}-r{shape.rows}-k{shape.keys}-s{shape.stages}",
)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_block_fits_on_ampere_and_hopper(head_dim):
    for shape in shapes(head_dim, 164 * 1024):
        assert shape.shared_bytes <= 163 * 1024
        if head_dim <= 128:
            assert 2 * (shape.shared_bytes + 1024) <= 228 * 1024
    assert shapes(head_dim, 164 * 1024) == shapes(head_dim, 228 * 1024)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_block_fits_on_ada_and_small_blackwells(head_dim):
    few, some, many = shapes(head_dim, 100 * 1024)
    assert max(shape.shared_bytes for shape in (few, some, many)) <= 99 * 1024
    assert few.rows == 16 < some.rows <= many.rows, "as on other GPUs"
    l40s = Gpu(142, 100 * 1024, is_hopper=False)
    assert heads_shape(Heads(HeadsShape.heads, 1, head_dim), l40s) is None


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_two_blocks_of_the_heads_kernel_fit_on_hopper_and_one_on_ampere(head_dim):
    shared_bytes = HeadsShape(head_dim).shared_bytes
    assert 2 * (shared_bytes + 1024) <= 228 * 1024
    assert shared_bytes + 1024 <= 164 * 1024


@pytest.mark.parametrize("cached", ["", "Fp8", "Int8"])
def test_blocks_of_the_heads_kernel_are_in_pairs_on_hopper_for_caches_of_bytes(cached):
    heads, h200 = Heads(8, 4, 128, cached), Gpu(132, 228 * 1024, is_hopper=True)
    assert heads_shape(heads, h200) == HeadsShape(128, cached, paired=cached != "")
    for gpu in (h200._replace(num_multiprocessors=131), h200._replace(is_hopper=False)):
        assert heads_shape(heads, gpu) == HeadsShape(128, cached)


# ---------------------------------------------------------------- copies and shared memory


@all_shapes
def test_a_tile_is_copied_once_each_warp_from_whole_pages(shape: Shape):
    warps = shape.threads // 32
    chunks = shape.head_dim // 8
    copy_keys = shape.keys // warps
    page_keys = copy_keys
    assert page_keys <= 16
    seen = np.zeros((shape.keys, chunks), np.int32)
    for warp in range(warps):
        for page in range(copy_keys // page_keys):
            first_row = warp * copy_keys + page * page_keys
            assert first_row // 16 == (first_row + page_keys - 1) // 16, "one block of the cache"
            for i in range(page_keys * chunks // 32):
                row, chunk = np.divmod(i * 32 + LANES, chunks)
                np.add.at(seen, (first_row + row, chunk), 1)
    assert (seen == 1).all()
    if shape.warps_m == 1:  # no barrier in the loop: a warp multiplies what it copied itself
        assert copy_keys == shape.keys // shape.warps_n


@all_shapes
def test_shared_memory_has_no_bank_conflicts(shape: Shape):
    pitch = (shape.head_dim + 8) * 2
    # An ldmatrix reads 8 rows of 16 bytes at a time.
    assert len(set(banks(np.arange(8) * pitch, 16))) == 32
    # Sums are stored as float2: half a warp at a time, rows lane / 4, columns 2 * (lane % 4).
    half = LANES[:16]
    assert len(set(banks((half // 4 * (shape.head_dim + 8) + half % 4 * 2) * 4, 8))) == 32


# ---------------------------------------------------------------- matrix fragments


def test_fragments_multiply_queries_keys_and_values():
    """One warp, 16 rows, 32 keys, 64 columns, through the lane addresses of attention_tile.cuh."""
    rng = np.random.default_rng(1)
    queries, keys, values = rng.random((16, 64)), rng.random((32, 64)), rng.random((32, 64))
    scores = np.zeros((4, 32, 4))
    for step in range(4):
        a = left(ldmatrix(queries, LANES % 16, step * 16 + LANES // 16 * 8))
        for n in range(2):
            rows = n * 16 + LANES // 16 * 8 + LANES % 8
            b = ldmatrix(keys, rows, step * 16 + LANES // 8 % 2 * 8)
            scores[2 * n] += accumulators(a @ right(b[:, :2]))
            scores[2 * n + 1] += accumulators(a @ right(b[:, 2:]))
    expected = queries @ keys.T
    for n in range(4):
        np.testing.assert_allclose(scores[n], accumulators(expected[:, 8 * n : 8 * n + 8]))

    sums = np.zeros((8, 32, 4))
    for n in range(2):
        packed = np.stack(
            [
                scores[2 * n][:, 0:2],
                scores[2 * n][:, 2:4],
                scores[2 * n + 1][:, 0:2],
                scores[2 * n + 1][:, 2:4],
            ],
            axis=1,
        )
        for column in range(4):
            rows = n * 16 + LANES % 16
            b = ldmatrix(values, rows, column * 16 + LANES // 16 * 8, transposed=True)
            sums[2 * column] += accumulators(left(packed) @ right(b[:, :2]))
            sums[2 * column + 1] += accumulators(left(packed) @ right(b[:, 2:]))
    expected = expected @ values
    for n in range(8):
        np.testing.assert_allclose(sums[n], accumulators(expected[:, 8 * n : 8 * n + 8]))


def test_transposed_is_that():
    word = np.arange(64).reshape(8, 8)
    laid = np.stack([word[LANES // 4, 2 * (LANES % 4) + e] for e in range(2)], axis=1)
    turned = np.stack([word.T[LANES // 4, 2 * (LANES % 4) + e] for e in range(2)], axis=1)
    assert (transposed(laid) == turned).all()


def test_fragments_multiply_keys_and_queries_turned_round():
    """One warp, 16 keys, 8 rows, 64 columns, by the addresses of attention_heads_tile.cuh."""
    rng = np.random.default_rng(1)
    queries, keys, values = rng.random((8, 64)), rng.random((16, 64)), rng.random((16, 64))
    scores = np.zeros((32, 4))
    for step in range(4):
        a = left(ldmatrix(keys, LANES % 16, step * 16 + LANES // 16 * 8))
        # Of a row of queries, as HeadRow loads it: two pairs of each 16 columns.
        columns = step * 16 + LANES % 4 * 2
        words = np.stack(
            [
                np.stack([queries[LANES // 4, columns + half * 8 + e] for e in range(2)], axis=1)
                for half in range(2)
            ],
            axis=1,
        )
        scores += accumulators(a @ right(words))
    expected = keys @ queries.T
    np.testing.assert_allclose(scores, accumulators(expected))
    # What a lane masks and takes the maximum of.
    held = accumulators(np.arange(16)[:, None] * np.ones((1, 8)))
    assert (held == (LANES // 4)[:, None] + np.array([0, 0, 8, 8])).all()
    held = accumulators(np.arange(8) * np.ones((16, 1)))
    assert (held == (LANES % 4 * 2)[:, None] + np.array([0, 1, 0, 1])).all()

    weights = np.stack([transposed(scores[:, 0:2]), transposed(scores[:, 2:4])], axis=1)
    expected = values.T @ expected
    rows = LANES // 16 * 8 + LANES % 8
    for column in range(4):
        a = ldmatrix(values, rows, column * 16 + LANES // 8 % 2 * 8, transposed=True)
        sums = accumulators(left(a) @ right(weights))
        np.testing.assert_allclose(sums, accumulators(expected[16 * column : 16 * column + 16]))
        # And to memory: a lane has two columns of one row.
        for half in range(2):
            word = transposed(sums[:, 2 * half : 2 * half + 2])
            first = column * 16 + half * 8 + LANES % 4 * 2
            for element in range(2):
                np.testing.assert_allclose(word[:, element], expected[first + element, LANES // 4])


def test_the_rows_that_a_lane_masks_are_those_it_holds():
    rows = np.arange(16)[:, None] * np.ones((1, 8))
    held = accumulators(rows)
    assert (held == (LANES // 4)[:, None] + np.array([0, 0, 8, 8])).all()


def test_every_shape_of_every_type_is_instantiated():
    counts = {stem: len(set(names)) for stem, names, _ in instantiations()}
    # With and without norms, and with shared prefixes; heads of 64, 96 and 128, which have two.
    of_few_rows = 3 * 4
    of_chunks = 3  # heads of 64 and 128, with a cache of q's type
    anywhere = 3 * 3 + 2
    for_small_memories = 1 + 2  # heads of 128 and 256
    types = 2 + 2  # with a cache of 8 bits, in bfloat16 only
    assert counts == {
        "attention": types * (anywhere + for_small_memories + of_few_rows) + 2 * of_chunks,
        "attention_heads": 3 * (2 * types + 2),  # bytes in pairs of blocks, too
        "attention_hopper": 2 * 2 + 2,  # of bfloat16 to e4m3, too
        "attention_dequantize": 2 * 2,  # types of 8 bits, heads with a kernel for Hopper
        "attention_plan": 5,
    }


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("shared_kib", [100, 164, 228])
def test_whatever_a_gpu_takes_is_instantiated(shared_kib, head_dim):
    compiled = {name for _, names, _ in instantiations() for name in names}
    few, some, many = shapes(head_dim, shared_kib << 10)
    for storage in ("__nv_bfloat16", "__half"):
        assert {shape.name(storage) for shape in (few, some, many)} <= compiled
        assert not few.cascades or few.cascade_name(storage) in compiled
    for cached in BYTE_TYPES.values():
        of_bytes = shapes(head_dim, shared_kib << 10, cached)
        assert {shape.name("__nv_bfloat16") for shape in of_bytes} <= compiled
        of_heads = heads_shape(Heads(8, 4, head_dim, cached), Gpu(132, shared_kib << 10, True))
        assert of_heads is None or of_heads.name("__nv_bfloat16") in compiled
    bfloat16 = [("__nv_bfloat16", cached) for cached in ("", *BYTE_TYPES.values())]
    for storage, cached in [("__half", ""), *bfloat16]:
        few, _, _ = shapes(head_dim, shared_kib << 10, cached)
        assert few.rotates == (head_dim <= 128)
        if few.rotates:
            assert {few.rotating_name(storage, norms) for norms in (False, True)} <= compiled
        assert few.rotates_chunks == (not cached and head_dim in (64, 128))
        if few.rotates_chunks:
            assert few.rotating_chunk_name(storage) in compiled


def test_a_chunk_that_is_rotated_has_as_many_tokens_as_in_the_kernel():
    source = (
        Path(attention.__file__).parents[2] / "csrc/attention/attention_source.cuh"
    ).read_text()
    assert re.search(rf"\bMAX_ROPE_TOKENS = {MAX_ROPE_TOKENS}\b", source)


@pytest.mark.parametrize(
    ("num_chunks", "num_tokens", "group", "expected"),
    [
        (1, 8, 3, [16]),  # 24 rows: two units
        (1, 16, 4, [16]),
        (1, 17, 4, [128]),
        (2, 16, 3, [64]),  # of 8 tokens each
        (2, 8, 4, [16]),
    ],
)
def test_a_chunk_alone_has_units_of_few_rows(num_chunks, num_tokens, group, expected):
    gpu, heads = Gpu(132, 228 << 10, True), Heads(3, group, 64)
    found = parts(num_chunks, num_tokens, num_tokens // num_chunks, heads, gpu)
    assert [part.shape.rows for part in found] == expected


# ---------------------------------------------------------------- tiles on Hopper


def place(row, chunk, head_dim):
    """Where 16 bytes of a tile are."""
    piece = row // 8 * head_dim * 16 + chunk // 8 * 1024
    return piece + row % 8 * 128 + ((chunk % 8) ^ (row % 8)) * 16


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_boxes_land_where_the_products_look(head_dim, block_size):
    """A box (block_size / 8, D / 64, 8, 64) is written in order, the 128-byte rows swizzled."""
    keys = HopperShape(head_dim).keys
    tile = np.full(keys * head_dim * 2 // 16, -1)
    for page in range(keys // block_size):
        box = np.arange(block_size * head_dim * 2 // 16)
        target = page * block_size * head_dim * 2 + box * 16
        target ^= (target >> 7 & 7) << 4  # what the copy engine does to addresses
        row = page * block_size + box // (head_dim // 64 * 64) * 8 + box // 8 % 8
        chunk = box // 64 % (head_dim // 64) * 8 + box % 8
        assert (target == place(row, chunk, head_dim)).all()
        tile[target // 16] = row
    assert (tile >= 0).all()


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_hopper_tiles_have_no_bank_conflicts(head_dim):
    # Results are stored as 4 bytes per lane: rows lane / 4, 8 columns in a chunk.
    lane_places = place(LANES // 4, 3, head_dim) + LANES % 4 * 4
    assert len(set(banks(lane_places, 4))) == 32
    # And loaded as 16: eight lanes at a time, chunks of one row.
    assert len(set(banks(place(5, np.arange(8), head_dim), 16))) == 32


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_a_hopper_block_fits_in_shared_memory(head_dim):
    assert HopperShape(head_dim).shared_bytes + 1024 <= 227 * 1024
