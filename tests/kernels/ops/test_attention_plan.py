"""The index maps of attention_tile.cuh, attention_heads.cu and attention_hopper.cu, reimplemented
in numpy, and their invariants.

The kernels need a GPU (tests/kernels/gpu); these checks do not: each key is paired with each row
once, lanes hold the fragments of the mma instructions, and shared memory has no bank conflicts.
"""

from __future__ import annotations

import functools
import heapq
import itertools

import numpy as np
import pytest

from inflight_kernels.ops.attention import instantiations
from inflight_kernels.ops.attention_dispatch import (
    HEAD_DIMS,
    HOPPER_HEAD_DIMS,
    Gpu,
    HeadsShape,
    HopperShape,
    Shape,
    max_workspace_bytes,
    parts,
    shapes,
)

H200 = Gpu(132, 228 * 1024, is_hopper=True)
A100 = Gpu(108, 164 * 1024, is_hopper=False)
LANES = np.arange(32)

all_shapes = pytest.mark.parametrize(
    "shape",
    [shape for head_dim in HEAD_DIMS for shape in dict.fromkeys(shapes(head_dim))],
    ids=lambda shape: f"d{shape.head_dim}-r{shape.rows}",
)


# ---------------------------------------------------------------- the plan


def plan_items(q_lens, kv_lens, group, part, window):
    """(chunk, first row, first key tile, key tiles) of each item, in the order of the plan."""
    items = list(unsorted_items(q_lens, kv_lens, group, part, window))
    if isinstance(part.shape, HopperShape):
        items.sort(key=lambda item: -item[-1])
    return items


def unsorted_items(q_lens, kv_lens, group, part, window):
    shape, min_rows, max_rows = part.shape, part.min_rows, part.max_rows
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


def pieces_of(tiles, size):
    return -(-tiles // size)


def cut_into_shares(tiles, num_kv_heads, num_shares):
    """[(first tile, last tile + 1, blocks of its unit)] as `plan` cuts units that have `tiles` of
    each item; blocks only where units are cut into pieces."""
    first = np.cumsum([0] + [count * num_kv_heads for count in tiles])
    total = int(first[-1])
    units = len(tiles) * num_kv_heads
    even = max(1, -(-total // num_shares))
    tolerable = even + even // 16 + 2
    if units <= num_shares:
        sizes = [even + warp * (-(-even // 32)) for warp in range(32)]
        fits = [
            size
            for size in sizes
            if sum(pieces_of(count, size) for count in tiles) * num_kv_heads <= num_shares
        ]
        smallest = min(fits, default=None)
        longest = max(tiles, default=1)
        uncut = longest <= (smallest or even) + 4
        size = longest if uncut else smallest
        if uncut or (size is not None and size <= tolerable):
            found = []
            for k, count in enumerate(tiles):
                for head in range(num_kv_heads):
                    begin = int(first[k]) + head * count
                    blocks = (len(found), len(found) + pieces_of(count, size) - 1)
                    found += [
                        (begin + at, begin + min(count, at + size), blocks)
                        for at in range(0, count, size)
                    ]
            return found + [(0, 0, None)] * (num_shares - len(found))
    borders = [share_begin(share, total, num_shares) for share in range(num_shares + 1)]
    if units > num_shares:
        starts = np.sort(
            np.concatenate(
                [first[k] + count * np.arange(num_kv_heads) for k, count in enumerate(tiles)]
                + [[total]]
            )
        )
        moved = [int(starts[np.searchsorted(starts, border)]) for border in borders]
        if max(np.diff(moved)) <= tolerable:
            borders = moved
    return [(*pair, None) for pair in itertools.pairwise(borders)]


LENGTHS = {
    "one short": [300],
    "one": [400],
    "one long": [16384],
    "one of a token": [1],
    "eight": [400] * 8,
    "sixteen long": [8300] * 16,
    "ragged": [128, 30_000, 16, 5000],
    "many": [300] * 64,
    "many long": [4096] * 64,
    "many ragged": [128 * (i % 60 + 1) for i in range(64)],
}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_shares_cover_a_step_of_decodes_and_pieces_know_their_blocks(lengths, num_kv_heads):
    tiles = [-(-length // 64) for length in LENGTHS[lengths]]
    shares = cut_into_shares(tiles, num_kv_heads, 264)
    assert len(shares) == 264
    used = [share for share in shares if share[0] < share[1]]
    assert [share[0] for share in used] == [0] + [share[1] for share in used[:-1]]
    assert used[-1][1] == sum(tiles) * num_kv_heads
    starts = np.cumsum([0] + [count for count in tiles for _ in range(num_kv_heads)])
    for block, (begin, end, blocks) in enumerate(shares):
        if blocks is None:
            continue
        unit = int(np.searchsorted(starts, begin, side="right")) - 1
        assert end <= starts[unit + 1], "a piece is of one unit"
        assert blocks[0] <= block <= blocks[1]
        assert shares[blocks[0]][0] == starts[unit] and shares[blocks[1]][1] == starts[unit + 1]


@pytest.mark.parametrize(
    ("lengths", "cut", "largest"),
    [
        ("one short", False, 5),  # merging costs more than four more tiles in turn
        ("one", True, 1),
        ("one long", True, 8),
        ("eight", True, 2),
        ("sixteen long", True, 66),
        ("many", False, 10),
        ("many long", False, 128),
    ],
)
def test_units_are_cut_only_where_that_is_faster(lengths, cut, largest):
    tiles = [-(-length // 64) for length in LENGTHS[lengths]]
    shares = cut_into_shares(tiles, 8, 264)
    starts = set(np.cumsum([0] + [count for count in tiles for _ in range(8)]).tolist())
    assert any(begin < end and begin not in starts for begin, end, _ in shares) == cut
    assert max(end - begin for begin, end, _ in shares) == largest


STEPS = {
    "decode": ([1] * 64, [1024] * 64, 0),
    "many": ([1, 0, 2] * 120, [90, 0, 17] * 120, 0),
    "many and a prompt": ([1] * 250 + [300], [90] * 250 + [300], 50),
    "ragged decode": ([1] * 9, [1, 128, 32_000, 5, 64, 65, 700, 0, 2], 0),
    "verify": ([5] * 7, [5, 100, 64, 1000, 77, 300, 2000], 0),
    "prefill": ([300, 70], [300, 70], 0),
    "chunks and rows": ([1, 200, 0, 3, 1, 33], [900, 1500, 0, 40, 1, 33], 0),
    "window": ([1, 200, 3], [900, 1500, 40], 100),
    "one chunk": ([700], [4000], 0),
}


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("device", "head_dim"), [(H200, 128), (H200, 256), (A100, 128)])
@pytest.mark.parametrize("step", STEPS)
def test_each_row_meets_each_key_that_it_sees_exactly_once(step, device, head_dim, group):
    q_lens, kv_lens, window = STEPS[step]
    window = window or 1 << 30
    num_kv_heads = 4
    met = [np.zeros((q * group, k), np.int32) for q, k in zip(q_lens, kv_lens, strict=True)]
    heads = (num_kv_heads, group, head_dim)
    for part in parts(len(q_lens), sum(q_lens), max(q_lens), *heads, device):
        shape = part.shape
        num_places = num_kv_heads // shape.heads
        items = plan_items(q_lens, kv_lens, group, part, window)
        assert len(items) * 32 <= part.slots - part.items, "the list fits its place"
        first = np.cumsum([0] + [tiles * num_places for *_, tiles in items])
        total = int(first[-1])
        for share in range(part.num_shares):
            tile = share_begin(share, total, part.num_shares)
            end = share_begin(share + 1, total, part.num_shares)
            while tile < end:
                k = int(np.searchsorted(first, tile, side="right")) - 1
                i, first_row, begin, tiles = items[k]
                head, from_tile = divmod(tile - int(first[k]), tiles)
                to_tile = min(tiles, from_tile + end - tile)
                if head == 0:  # all have the same tiles
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
def test_a_split_unit_has_its_own_slots_and_counter(num_shares):
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


# ---------------------------------------------------------------- the queue of whole units


def queue_time(tiles, num_kv_heads, num_blocks):
    """Tiles of the busiest block, as `plan` guesses them; items from long to short."""
    turns = sum(
        tiles[unit // num_kv_heads] for unit in range(0, len(tiles) * num_kv_heads, num_blocks)
    )
    return max(tiles[0], turns - tiles[0] // 2)


def heads_at_once(tiles, num_kv_heads, num_blocks):
    turns = sum(tiles) * num_kv_heads // (2 * tiles[0] * num_blocks)
    return -(-num_kv_heads // min(max(turns, 1), num_kv_heads))


def queue_unit(taken, num_items, heads, num_kv_heads):
    """(item, head) of a unit of the queue."""
    first_head = taken // (num_items * heads) * heads
    heads = min(heads, num_kv_heads - first_head)
    item, head = divmod(taken - first_head * num_items, heads)
    return item, first_head + head


QUEUES = {
    "8 prompts": ([1024] * 8, [1024] * 8),
    "4 prompts": ([4096] * 4, [4096] * 4),
    "a long prompt": ([16384], [16384]),
    "a chunk": ([2048], [2048]),
    "a late chunk": ([2048], [10240]),
    "a small chunk": ([640], [8192]),
    "a tiny chunk": ([40], [9000]),
    "many": ([100] * 40 + [3000], [5000] * 40 + [3000]),
}


@pytest.mark.parametrize("step", QUEUES)
def test_whole_units_are_taken_where_that_is_not_slower_than_shares(step):
    q_lens, kv_lens = QUEUES[step]
    num_kv_heads, num_blocks, cut = 8, 132, 6
    (part, *_) = reversed(parts(len(q_lens), sum(q_lens), max(q_lens), 8, 4, 128, H200))
    tiles = [tiles for *_, tiles in plan_items(q_lens, kv_lens, 4, part, 1 << 30)]
    heads = heads_at_once(tiles, num_kv_heads, num_blocks)
    blocks = [0] * num_blocks
    for unit in range(len(tiles) * num_kv_heads):
        item, _ = queue_unit(unit, len(tiles), heads, num_kv_heads)
        heapq.heapreplace(blocks, blocks[0] + tiles[item])
    shares = sum(tiles) * num_kv_heads / num_blocks + cut
    guess = queue_time(tiles, num_kv_heads, num_blocks)
    chosen = max(blocks) if guess <= shares else shares
    assert chosen <= 1.1 * min(max(blocks), shares)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_items", [1, 5, 512])
def test_the_queue_has_each_unit_once(num_items, num_kv_heads):
    for heads in range(1, num_kv_heads + 1):
        units = {
            queue_unit(taken, num_items, heads, num_kv_heads)
            for taken in range(num_items * num_kv_heads)
        }
        assert units == set(itertools.product(range(num_items), range(num_kv_heads)))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 71])
def test_rows_are_divided_by_the_group_through_a_product(group):
    rows = np.unique(np.geomspace(1, (1 << 32) // group - 1, 5000).astype(np.uint64))
    rows = np.concatenate([rows, rows // group * group, rows // group * group - 1])
    rows = rows[rows < 1 << 31]
    if group > 1:
        assert (rows * np.uint64(0xFFFFFFFF // group + 1) >> 32 == rows // group).all()


# ---------------------------------------------------------------- launches


def test_small_steps_use_one_launch_and_mixed_ones_two():
    def rows(*args):
        return [part.shape.rows for part in parts(*args, 8, 4, 128, H200)]

    assert rows(64, 64, 1) == [16]
    assert rows(8, 40, 5) == [64]
    assert rows(1, 2048, 2048) == [128]
    assert rows(9, 2056, 2048) == [16, 128]


@pytest.mark.parametrize(
    ("num_chunks", "max_q_len", "heads", "rows"),
    [
        (64, 1, (8, 4, 128), [16]),
        (128, 1, (8, 4, 128), [8]),  # a unit for each block
        (160, 1, (8, 4, 128), [16]),  # many would be cut
        (256, 1, (8, 4, 128), [8]),
        (256, 2, (8, 4, 128), [8]),
        (256, 3, (8, 4, 128), [16]),  # more rows than it has
        (256, 300, (8, 4, 128), [8, 128]),
        (256, 1, (8, 9, 128), [16]),
        (256, 1, (6, 4, 128), [16]),
        (256, 1, (8, 4, 256), [16]),
    ],
)
def test_many_sequences_have_a_warp_for_each_head(num_chunks, max_q_len, heads, rows):
    found = parts(num_chunks, num_chunks + max_q_len - 1, max_q_len, *heads, H200)
    assert [part.shape.rows for part in found] == rows
    assert found[0].max_rows >= rows[0] and found[-1].max_rows > 1 << 30
    assert [part.min_rows for part in found] == [0, *rows[:-1]]


def test_hopper_has_its_own_kernel_for_many_rows():
    def stems(head_dim, device):
        return [part.shape.stem for part in parts(9, 2056, 2048, 8, 4, head_dim, device)]

    assert stems(128, H200) == stems(64, H200) == ["attention", "attention_hopper"]
    assert stems(256, H200) == stems(96, H200) == stems(128, A100) == ["attention", "attention"]


def test_parts_are_consecutive_and_aligned():
    for part in (found := parts(9, 2056, 2048, 8, 4, 128, H200)):
        places = [
            part.arrivals,
            part.queue,
            part.shares,
            part.first_item,
            part.items,
            part.slots,
            part.end,
        ]
        assert places == sorted(set(places))
        assert all(place % 256 == 0 for place in places)
    assert found[0].end == found[1].arrivals


@functools.cache
def end_of_parts(num_chunks, num_tokens, q_len, heads, device):
    """Most steps recur: smaller ones are those of several largest ones."""
    return parts(num_chunks, num_tokens, q_len, *heads, device)[-1].end


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 9, 32, 128])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("most", [1, 2, 8, 100, 150, 192, 256, 700])
def test_a_workspace_for_the_largest_step_serves_all_smaller_ones(most, device, head_dim, group):
    """Whichever kernel they have: with 128 chunks it is one that needs more room than with 192, and
    one chunk of 16 tokens goes to one that needs more than the one for 1000."""
    heads = (8, group, head_dim)
    counts = sorted({*range(1, min(most, 20)), *range(20, most, 37), 128, 192, most})
    for max_tokens in (most, most + 1, most + 300, 1024):
        room = max_workspace_bytes(most, max_tokens, None, *heads, device)
        for num_chunks in (count for count in counts if count <= min(most, max_tokens)):
            # A captured step may get a larger max_q_len than it has room for.
            for q_len in (1, 2, 3, 4, 5, 8, 15, 16, 17, 21, 22, 32, 63, 64, 65, max_tokens):
                num_tokens = min(max_tokens, num_chunks * q_len)
                assert end_of_parts(num_chunks, num_tokens, q_len, heads, device) <= room


@all_shapes
def test_a_block_fits_on_ampere_and_hopper(shape):
    assert shape.shared_bytes <= 163 * 1024
    if shape.head_dim <= 128:
        assert 2 * (shape.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_two_blocks_of_the_heads_kernel_fit_on_hopper_and_one_on_ampere(head_dim):
    shared_bytes = HeadsShape(head_dim).shared_bytes
    assert 2 * (shared_bytes + 1024) <= 228 * 1024
    assert shared_bytes + 1024 <= 164 * 1024


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


def transposed(word):
    """movmatrix: 8x8, two elements a lane, as ldmatrix lays them."""
    matrix = np.empty((8, 8), word.dtype)
    for element in range(2):
        matrix[LANES // 4, 2 * (LANES % 4) + element] = word[:, element]
    return matrix[2 * (LANES % 4)[:, None] + np.arange(2), (LANES // 4)[:, None]]


def test_transposed_is_that():
    word = np.arange(64).reshape(8, 8)
    laid = np.stack([word[LANES // 4, 2 * (LANES % 4) + e] for e in range(2)], axis=1)
    turned = np.stack([word.T[LANES // 4, 2 * (LANES % 4) + e] for e in range(2)], axis=1)
    assert (transposed(laid) == turned).all()


def test_fragments_multiply_keys_and_queries_turned_round():
    """One warp, 16 keys, 8 rows, 64 columns, through the lane addresses of attention_heads.cu."""
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
    rotating = 2 * 2 * 3  # with and without norms, heads of 64, 96 and 128
    anywhere = 2 * (3 * 3 + 2) + rotating
    assert counts == {
        "attention": anywhere,
        "attention_heads": 2 * 3,
        "attention_hopper": 2 * 2,
        "attention_plan": 1,
    }


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
