"""The plan of shared prefixes, reimplemented in Python; tests/kernels/gpu/test_cascade.py compares
the device's with it."""

from __future__ import annotations

import numpy as np
import pytest

from inflight_kernels.ops.attention.dispatch import (
    MIN_CASCADE_CHUNKS,
    PREFIX_KEYS,
    PREFIX_ROWS,
    Gpu,
    Heads,
    cascades,
    max_prefix_pieces,
    parts,
)
from prefix_plan import CutPrefix, SharedPrefix, cut_prefixes, find_prefixes, num_units

H200 = Gpu(132, 228 * 1024, is_hopper=True)
A100 = Gpu(108, 164 * 1024, is_hopper=False)
L40S = Gpu(142, 100 * 1024, is_hopper=False)


def tables_of(kv_lens, prefixes, block_size=16):
    """Block tables; `prefixes` are the keys in shared blocks, by the chunks that share them."""
    tables, used = [], 0
    for kv_len in kv_lens:
        count = -(-kv_len // block_size)
        tables.append(list(range(used, used + count)))
        used += count
    for members, keys in prefixes.items():
        for member in members:
            blocks = keys // block_size
            tables[member][:blocks] = tables[members[0]][:blocks]
    return tables


def find(kv_lens, prefixes, *, min_keys=128, min_saved=1024, block_size=16, q_lens=None):
    tables = tables_of(kv_lens, prefixes, block_size)
    q_lens = q_lens or [1] * len(kv_lens)
    return find_prefixes(q_lens, kv_lens, tables, block_size, min_keys, min_saved)


def test_all_sequences_share_one_prefix():
    members = tuple(range(256))
    found = find([2048 + 1 + i for i in members], {members: 2048})
    assert found == [SharedPrefix(0, members, 32)]


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_prefix_ends_with_whole_tiles_and_leaves_each_sequence_a_key(block_size):
    members = tuple(range(16))
    assert find([641] * 16, {members: 640}, block_size=block_size)[0].tiles == 10
    assert find([640] * 16, {members: 640}, block_size=block_size)[0].tiles == 9
    short = find([800] * 16, {members: 700 // block_size * block_size}, block_size=block_size)
    assert short[0].tiles == 10


def test_members_need_not_be_neighbours_and_several_prefixes_are_found():
    one, other = tuple(range(0, 60, 3)), tuple(range(1, 60, 3))
    found = find([900 + i for i in range(60)], {one: 512, other: 768})
    assert found == [SharedPrefix(0, one, 8), SharedPrefix(1, other, 12)]


def test_the_prefix_that_saves_most_is_taken_of_those_that_are_nested():
    every, some = tuple(range(40)), tuple(range(10))
    found = find([3000] * 40, {every: 1024, some: 1280})
    assert found == [SharedPrefix(0, every, 16)]
    found = find([3000] * 40, {every: 128, some: 2048})
    assert found[0] == SharedPrefix(0, some, 32)
    assert found[1] == SharedPrefix(10, every[10:], 2)


def test_what_saves_too_little_is_not_shared():
    pair = (3, 7)
    assert find([500] * 9, {pair: 448}) == []
    assert find([500] * 9, {pair: 448}, min_saved=448) == [SharedPrefix(3, pair, 7)]
    assert find([500] * 9, {tuple(range(9)): 64}, min_saved=0) == []
    assert find([500] * 9, {}) == []


def test_only_chunks_of_one_token_share():
    members = tuple(range(16))
    found = find([1000] * 16, {members: 640}, q_lens=[1, 2] * 8)
    assert found == [SharedPrefix(0, members[::2], 10)]
    assert find([1000] * 16, {members: 640}, q_lens=[2] * 16) == []


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("counts", "tiles"),
    [([256], [32]), ([64], [128]), ([2], [2000]), ([256], [1]), ([700, 9, 200], [40, 3, 17])],
)
def test_pieces_cover_each_unit_and_fit_the_memory(counts, tiles, group):
    num_kv_heads, num_blocks = 8, 264
    prefixes = [
        SharedPrefix(0, tuple(range(count)), long)
        for count, long in zip(counts, tiles, strict=True)
    ]
    most = max_prefix_pieces(sum(counts), Heads(num_kv_heads, group, 128), H200)
    cuts = cut_prefixes(prefixes, group, num_kv_heads, most, num_blocks)
    assert cuts[0].first_piece == 0 and cuts[-1].end_piece <= most
    for prefix, cut in zip(prefixes, cuts, strict=True):
        assert 0 <= prefix.tiles - (cut.pieces - 1) * cut.piece_tiles <= cut.piece_tiles
        assert (cut.pieces - 1) * cut.piece_tiles < prefix.tiles, "no piece is empty"
        units = num_units(prefix, group) * num_kv_heads
        assert cut.end_piece - cut.first_piece == units * cut.pieces


def test_blocks_have_equal_work():
    prefix = SharedPrefix(0, tuple(range(256)), 32)
    assert cut_prefixes([prefix], 4, 8, 528, 264) == [CutPrefix(2, 16, 0, 256)]
    prefix = SharedPrefix(0, tuple(range(64)), 128)
    assert cut_prefixes([prefix], 4, 8, 528, 264) == [CutPrefix(8, 16, 0, 256)]


@pytest.mark.parametrize("gpu", [H200, A100, L40S], ids=["H200", "A100", "L40S"])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_memory_for_many_chunks_serves_fewer(gpu, group):
    heads = Heads(8, group, 128)
    sizes = [max_prefix_pieces(count, heads, gpu) for count in range(1, 600, 7)]
    assert sizes == sorted(sizes)
    per_unit = PREFIX_ROWS // group
    for count in (8, 100, 599):
        assert max_prefix_pieces(count, heads, gpu) >= (-(-count // per_unit) + 3) * 8


def test_kernels_for_few_rows_share_prefixes():
    def shared(count, max_q_len, heads, gpu=H200):
        found = parts(count, count + max_q_len - 1, max_q_len, heads, gpu)
        return [cascades(part, count) for part in found]

    llama = Heads(8, 4, 128)
    assert shared(256, 1, llama) == shared(64, 1, llama) == shared(64, 1, llama, A100) == [True]
    assert shared(256, 300, llama) == [True, False]
    assert shared(MIN_CASCADE_CHUNKS - 1, 1, llama) == [False]
    assert shared(64, 8, llama) == shared(64, 1, Heads(1, 32, 128)) == [False]
    assert shared(64, 1, Heads(8, 2, 256)) == [False]
    assert shared(64, 1, Heads(8, 8, 64, "Fp8")) == [True]


def test_queries_of_a_unit_are_those_of_whole_sequences():
    for group in range(1, 17):
        rows = np.arange(PREFIX_ROWS // group * group)
        assert rows.max() < PREFIX_ROWS and len(set(rows // group)) == PREFIX_ROWS // group
    assert PREFIX_KEYS % 64 == 0, "whole blocks of the cache, of each size"
