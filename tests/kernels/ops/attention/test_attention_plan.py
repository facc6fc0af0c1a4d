"""The plan of attention, reimplemented in numpy: which thread block computes which rows and keys.

The kernels need a GPU (tests/kernels/gpu); these checks do not: each key is paired with each row
once, and work is cut where that is faster.
"""

from __future__ import annotations

import functools
import heapq
import itertools

import numpy as np
import pytest

from inflight_kernels.ops.attention.dispatch import (
    HEAD_DIMS,
    Gpu,
    Heads,
    HopperShape,
    max_workspace_bytes,
    parts,
)
from thinned import thinned

H200 = Gpu(132, 228 * 1024, is_hopper=True)
A100 = Gpu(108, 164 * 1024, is_hopper=False)
B200 = Gpu(148, 228 * 1024, is_hopper=False)
L40S = Gpu(142, 100 * 1024, is_hopper=False)
GPUS = {"H200": H200, "A100": A100, "L40S": L40S}


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
@pytest.mark.parametrize(
    ("device", "head_dim"), [(H200, 128), (H200, 256), (A100, 128), (L40S, 256)]
)
@pytest.mark.parametrize("step", STEPS)
def test_each_row_meets_each_key_that_it_sees_exactly_once(step, device, head_dim, group):
    q_lens, kv_lens, window = STEPS[step]
    window = window or 1 << 30
    num_kv_heads = 4
    met = [np.zeros((q * group, k), np.int32) for q, k in zip(q_lens, kv_lens, strict=True)]
    heads = (num_kv_heads, group, head_dim)
    for part in parts(len(q_lens), sum(q_lens), max(q_lens), Heads(*heads), device):
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
    (part, *_) = reversed(parts(len(q_lens), sum(q_lens), max(q_lens), Heads(8, 4, 128), H200))
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
        return [part.shape.rows for part in parts(*args, Heads(8, 4, 128), H200)]

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
    found = parts(num_chunks, num_chunks + max_q_len - 1, max_q_len, Heads(*heads), H200)
    assert [part.shape.rows for part in found] == rows
    assert found[0].max_rows >= rows[0] and found[-1].max_rows > 1 << 30
    assert [part.min_rows for part in found] == [0, *rows[:-1]]


def test_hopper_has_its_own_kernel_for_many_rows():
    def stems(head_dim, device):
        return [part.shape.stem for part in parts(9, 2056, 2048, Heads(8, 4, head_dim), device)]

    assert stems(128, H200) == stems(64, H200) == ["attention", "attention_hopper"]
    assert stems(256, H200) == stems(96, H200) == ["attention", "attention"]
    assert stems(128, A100) == stems(128, B200) == stems(128, L40S) == ["attention", "attention"]


def test_no_step_with_a_cache_of_8_bits_takes_the_kernel_that_reads_none():
    for head_dim in (64, 128):
        found = parts(9, 2056, 2048, Heads(8, 4, head_dim, "Int8"), H200)
        assert [part.shape.stem for part in found] == ["attention", "attention"]
        assert all(part.shape.cached == "Int8" for part in found)


def test_parts_are_consecutive_and_aligned():
    for part in (found := parts(9, 2056, 2048, Heads(8, 4, 128), H200)):
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
    return parts(num_chunks, num_tokens, q_len, heads, device)[-1].end


@pytest.mark.parametrize(
    ("most", "device", "head_dim", "group"),
    thinned(
        [1, 2, 8, 100, 150, 192, 256, 700],
        [pytest.param(one, id=name) for name, one in GPUS.items()],
        HEAD_DIMS,
        [1, 2, 3, 4, 8, 9, 32, 128],
        one_in=5,
    ),
)
def test_a_workspace_for_the_largest_step_serves_all_smaller_ones(most, device, head_dim, group):
    """Whichever kernel they have: with 128 chunks it is one that needs more room than with 192, and
    one chunk of 16 tokens goes to one that needs more than the one for 1000."""
    check_workspaces(most, device, Heads(8, group, head_dim))


@pytest.mark.parametrize("group", [1, 4, 9])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("device", GPUS.values(), ids=GPUS)
def test_a_workspace_for_a_cache_of_8_bits_serves_all_steps(device, head_dim, group):
    check_workspaces(192, device, Heads(8, group, head_dim, "Fp8"))


def check_workspaces(most, device, heads):
    counts = sorted({*range(1, min(most, 20)), *range(20, most, 37), 128, 192, most})
    for max_tokens in (most, most + 1, most + 300, 1024):
        room = max_workspace_bytes(most, max_tokens, None, heads, device)
        for num_chunks in (count for count in counts if count <= min(most, max_tokens)):
            # A captured step may get a larger max_q_len than it has room for.
            for q_len in (1, 2, 3, 4, 5, 8, 15, 16, 17, 21, 22, 32, 63, 64, 65, max_tokens):
                num_tokens = min(max_tokens, num_chunks * q_len)
                assert end_of_parts(num_chunks, num_tokens, q_len, heads, device) <= room
