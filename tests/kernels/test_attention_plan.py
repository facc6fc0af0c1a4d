"""The index maps of attention.cu, written a second time in numpy, and what they must satisfy.

The kernel itself needs a GPU (tests/kernels/gpu); that each key meets each row once, that lanes
hold what the matrix instructions take, and that shared memory has no bank conflicts does not.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inflight_kernels.attention import HEAD_DIMS, Shape, instantiations, parts, shapes

H200 = {"num_multiprocessors": 132, "shared_bytes": 228 * 1024}
LANES = np.arange(32)

all_shapes = pytest.mark.parametrize(
    "shape",
    [shape for head_dim in HEAD_DIMS for shape in dict.fromkeys(shapes(head_dim))],
    ids=lambda shape: f"d{shape.head_dim}-r{shape.rows}",
)


# ---------------------------------------------------------------- the plan


def plan_items(q_lens, kv_lens, group, shape, window, min_rows, max_rows):
    """(chunk, first row, first key tile, key tiles) of each item, in order."""
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows = q_len * group
        if not min_rows < rows <= max_rows:
            continue
        for first_row in range(0, rows, shape.rows):
            last_row = min(first_row + shape.rows, rows) - 1
            lowest = kv_len - q_len + first_row // group
            highest = kv_len - q_len + last_row // group
            begin = max(0, lowest - window + 1) // shape.keys
            yield i, first_row, begin, max(1, int(highest / shape.keys) + 1 - begin)


def share_begin(share, total, num_shares):
    size, longer = divmod(total, num_shares)
    return share * size + min(share, longer)


def share_of(tile, total, num_shares):
    size, longer = divmod(total, num_shares)
    border = longer * (size + 1)
    return tile // (size + 1) if tile < border else longer + (tile - border) // size


STEPS = {
    "decode": ([1] * 64, [1024] * 64, 0),
    "ragged decode": ([1] * 9, [1, 128, 32_000, 5, 64, 65, 700, 0, 2], 0),
    "verify": ([5] * 7, [5, 100, 64, 1000, 77, 300, 2000], 0),
    "prefill": ([300, 70], [300, 70], 0),
    "chunks and rows": ([1, 200, 0, 3, 1, 33], [900, 1500, 0, 40, 1, 33], 0),
    "window": ([1, 200, 3], [900, 1500, 40], 100),
    "one chunk": ([700], [4000], 0),
}


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("step", STEPS)
def test_each_row_meets_each_key_that_it_sees_exactly_once(step, head_dim, group):
    q_lens, kv_lens, window = STEPS[step]
    window = window or 1 << 30
    num_kv_heads = 2
    met = [np.zeros((q * group, k), np.int32) for q, k in zip(q_lens, kv_lens, strict=True)]
    chosen = parts(len(q_lens), sum(q_lens), max(q_lens), group, head_dim, **H200)
    for part in chosen:
        shape = part.shape
        items = list(
            plan_items(q_lens, kv_lens, group, shape, window, part.min_rows, part.max_rows)
        )
        assert len(items) * 32 <= part.slots - part.items, "the list fits its place"
        first = np.cumsum([0] + [tiles * num_kv_heads for *_, tiles in items])
        total = int(first[-1])
        for share in range(part.num_shares):
            tile = share_begin(share, total, part.num_shares)
            end = share_begin(share + 1, total, part.num_shares)
            while tile < end:
                k = int(np.searchsorted(first, tile, side="right")) - 1
                i, first_row, begin, tiles = items[k]
                head, from_tile = divmod(tile - int(first[k]), tiles)
                to_tile = min(tiles, from_tile + end - tile)
                if head == 0:  # all heads have the same tiles
                    rows = np.arange(first_row, min(first_row + shape.rows, q_lens[i] * group))
                    keys = np.arange(
                        (begin + from_tile) * shape.keys, (begin + to_tile) * shape.keys
                    )
                    keys = keys[keys < kv_lens[i]]
                    last = kv_lens[i] - q_lens[i] + rows[:, None] // group
                    met[i][np.ix_(rows, keys)] += (keys <= last) & (keys > last - window)
                tile += to_tile - from_tile
    for i, counts in enumerate(met):
        last = kv_lens[i] - q_lens[i] + np.arange(len(counts))[:, None] // group
        keys = np.arange(kv_lens[i])
        assert (counts == ((keys <= last) & (keys > last - window))).all()


@pytest.mark.parametrize("total", [0, 1, 5, 131, 132, 133, 1000])
@pytest.mark.parametrize("num_shares", [1, 7, 132, 264])
def test_shares_cover_all_tiles_and_differ_by_one(total, num_shares):
    begins = [share_begin(share, total, num_shares) for share in range(num_shares + 1)]
    sizes = np.diff(begins)
    assert begins[0] == 0 and begins[-1] == total
    assert sizes.max() - sizes.min() <= 1
    for share, (begin, end) in enumerate(itertools.pairwise(begins)):
        for tile in range(begin, end):
            assert share_of(tile, total, num_shares) == share


@pytest.mark.parametrize("num_shares", [3, 7, 264])
def test_a_cut_unit_has_slots_and_a_counter_of_its_own(num_shares):
    """Slots and counters are named by blocks; no two units that are cut may meet in one."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        units = rng.integers(1, 40, size=rng.integers(1, 30))
        first = np.cumsum([0, *units])
        total = int(first[-1])
        slots, counters = set(), set()
        for unit, tiles in enumerate(units):
            begin = share_of(int(first[unit]), total, num_shares)
            end = share_of(int(first[unit] + tiles - 1), total, num_shares)
            if begin == end:
                continue
            assert begin not in counters
            counters.add(begin)
            for block in range(begin, end + 1):
                # What a block sees: whether its part of the unit is the unit's first.
                own = max(int(first[unit]), share_begin(block, total, num_shares))
                slot = 2 * block + (own == first[unit])
                assert slot == (2 * block + 1 if block == begin else 2 * block)
                assert slot not in slots
                slots.add(slot)


def test_small_steps_use_one_launch_and_mixed_ones_two():
    def rows(*args):
        return [part.shape.rows for part in parts(*args, 128, **H200)]

    assert rows(64, 64, 1, 4) == [16]
    assert rows(8, 40, 5, 4) == [64]
    assert rows(1, 2048, 2048, 4) == [128]
    assert rows(9, 2056, 2048, 4) == [16, 128]


def test_parts_lie_behind_each_other_and_aligned():
    for part in (found := parts(9, 2056, 2048, 4, 128, **H200)):
        places = [part.arrivals, part.shares, part.first_item, part.items, part.slots, part.end]
        assert places == sorted(set(places))
        assert all(place % 256 == 0 for place in places)
    assert found[0].end == found[1].arrivals


@all_shapes
def test_a_block_fits_ampere_and_hopper(shape):
    assert shape.shared_bytes <= 163 * 1024
    if shape.head_dim <= 128:
        assert 2 * (shape.shared_bytes + 1024) <= 228 * 1024


# ---------------------------------------------------------------- copies and shared memory


@all_shapes
def test_a_tile_is_copied_once_each_warp_from_whole_pages(shape: Shape):
    warps = shape.threads // 32
    chunks = shape.head_dim // 8
    copy_keys = shape.keys // warps
    page_keys = min(copy_keys, 16)
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


def banks(addresses, width):
    """Banks of 4 bytes that lanes touch, `width` bytes each."""
    return np.concatenate([(addresses + offset) // 4 % 32 for offset in range(0, width, 4)])


@all_shapes
def test_shared_memory_has_no_bank_conflicts(shape: Shape):
    pitch = (shape.head_dim + 8) * 2
    # An ldmatrix reads 8 rows of 16 bytes at a time.
    assert len(set(banks(np.arange(8) * pitch, 16))) == 32
    # Sums are stored as float2: half a warp at a time, rows lane / 4, columns 2 * (lane % 4).
    half = LANES[:16]
    assert len(set(banks((half // 4 * (shape.head_dim + 8) + half % 4 * 2) * 4, 8))) == 32


# ---------------------------------------------------------------- matrix fragments


def ldmatrix(tile, rows, columns, transposed=False):
    """[32, 4, 2]: what each lane gets of four 8x8 matrices, whose rows start at (rows, columns)."""
    out = np.empty((32, 4, 2), tile.dtype)
    for matrix in range(4):
        source = slice(8 * matrix, 8 * matrix + 8)
        values = np.stack(
            [tile[r, c : c + 8] for r, c in zip(rows[source], columns[source], strict=True)]
        )
        if transposed:
            values = values.T
        for element in range(2):
            out[:, matrix, element] = values[LANES // 4, 2 * (LANES % 4) + element]
    return out


def left(fragment):
    """[16, 16] from the registers a0..a3 of all lanes, as mma.m16n8k16 reads them."""
    matrix = np.full((16, 16), np.nan)
    for register, element in itertools.product(range(4), range(2)):
        row = LANES // 4 + register % 2 * 8
        matrix[row, 2 * (LANES % 4) + element + register // 2 * 8] = fragment[:, register, element]
    return matrix


def right(fragment):
    """[16, 8] from b0, b1."""
    matrix = np.full((16, 8), np.nan)
    for register, element in itertools.product(range(2), range(2)):
        matrix[2 * (LANES % 4) + element + register * 8, LANES // 4] = fragment[
            :, register, element
        ]
    return matrix


def accumulators(matrix):
    """[32, 4] of a [16, 8] result."""
    element = np.arange(4)
    return matrix[(LANES // 4)[:, None] + element // 2 * 8, 2 * (LANES % 4)[:, None] + element % 2]


def test_fragments_multiply_queries_keys_and_values():
    """One warp, 16 rows, 32 keys, 64 columns, through the very lane addresses of attention.cu."""
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


def test_the_rows_that_a_lane_masks_are_those_it_holds():
    rows = np.arange(16)[:, None] * np.ones((1, 8))
    held = accumulators(rows)
    assert (held == (LANES // 4)[:, None] + np.array([0, 0, 8, 8])).all()


def test_every_shape_of_every_type_is_instantiated():
    ((stem, names, defines),) = instantiations()
    assert stem == "attention" and not defines
    assert len(names) == len(set(names)) == 1 + 2 * (3 * 3 + 2)
