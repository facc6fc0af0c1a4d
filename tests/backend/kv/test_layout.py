"""Layers with a sliding window have a block table of their own, in the same pool of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.kv.layout import TILE_TOKENS, KVGroup, KVLayout, KVTable, KVTables
from inflight_kernels.ops.attention.dispatch import (
    HEAD_DIMS,
    HOPPER_HEAD_DIMS,
    HeadsShape,
    HopperShape,
    candidates,
)

BLOCK = 16


def layout(num_full: int, num_windowed: int, window: int = 1024, **changes: int) -> KVLayout:
    """Layers with 8 KV heads of 256; those with a window first."""
    shape = {"num_kv_heads": 8, "k_dim": 256, "v_dim": 256}
    sliding, full = range(num_windowed), range(num_windowed, num_windowed + num_full)
    groups = []
    if num_windowed:
        groups.append(KVGroup(tuple(sliding), **shape | changes, window=window))
    if num_full:
        groups.append(KVGroup(tuple(full), **shape))
    return KVLayout(tuple(groups), "bfloat16", frees_windows=True)


def tables(one: KVLayout) -> KVTables:
    return KVTables(one.tables, BLOCK)


def test_without_windows_there_is_one_table_that_keeps_everything() -> None:
    assert layout(4, 0).tables == (KVTable((0, 1, 2, 3)),)
    assert tables(layout(4, 0)).num_kept_blocks(160) == tables(layout(4, 0)).num_blocks(160) == 10


def test_windows_are_kept_where_blocks_are_not_freed_or_differ_in_size() -> None:
    kept = KVLayout(layout(1, 5).groups, "bfloat16")
    assert kept.tables == (KVTable((0, 1, 2, 3, 4, 5)),)
    uneven = layout(1, 5, num_kv_heads=4)
    assert uneven.tables == kept.tables
    assert uneven.block_bytes(BLOCK) == BLOCK * 2 * 2 * 256 * (5 * 4 + 8)


@pytest.mark.parametrize(
    ("num_full", "num_windowed", "counts"),
    [
        (8, 40, (5, 1)),  # Gemma 3 12B
        (5, 29, (6, 1)),  # Gemma 3 4B
        (13, 13, (1, 1)),  # Gemma 2 2B
        (8, 24, (3, 1)),  # Command R7B
        (3, 1, (1, 3)),
    ],
)
def test_blocks_of_both_tables_have_about_the_same_bytes(
    num_full: int, num_windowed: int, counts: tuple[int, int]
) -> None:
    one = layout(num_full, num_windowed)
    assert tuple(table.kernel_blocks for table in one.tables) == counts
    assert [len(table.layers) for table in one.tables] == [num_full, num_windowed]
    assert all(0.95 * one.num_slots <= table.num_slots for table in one.tables)
    token_bytes = 2 * 8 * (256 + 256)
    assert one.block_bytes(BLOCK) == one.num_slots * BLOCK * token_bytes


def test_a_model_with_windows_alone_has_one_table_that_frees() -> None:
    assert layout(0, 4).tables == (KVTable((0, 1, 2, 3), 1024),)


def test_sequences_that_decode_keep_their_windows() -> None:
    gemma = tables(layout(8, 40))
    # 80 tokens a block in layers without a window, 16 in the others, which begin at a whole tile.
    assert gemma.num_blocks(8192) == 103 + 512
    assert gemma.num_kept_blocks(8192) == 103 + (8192 - 7168) // 16
    assert gemma.num_kept_blocks(8193) == 103 + (8208 - 7168) // 16
    assert gemma.num_kept_blocks(1000) == gemma.num_blocks(1000) == 13 + 63


@given(
    counts=st.sampled_from([(1, 1), (3, 1), (1, 4)]),
    num_blocks=st.integers(0, 60),
    window=st.integers(1, 50),
)
def test_the_longest_sequence_fits_and_one_more_token_does_not(
    counts: tuple[int, int], num_blocks: int, window: int
) -> None:
    own = (KVTable((), 0, counts[0]), KVTable((), window, counts[1]))
    both = KVTables(own, 4)
    longest = both.max_tokens(num_blocks)
    assert both.num_blocks(longest) <= num_blocks < both.num_blocks(longest + 1)


@given(st.integers(1, 300), st.integers(0, 1000))
def test_no_query_reads_before_the_first_token_that_is_kept(window: int, position: int) -> None:
    first = KVTable(window=window).first_kept(position)
    assert first <= max(0, position - window + 1) < first + TILE_TOKENS
    assert first % TILE_TOKENS == 0


def test_all_attention_kernels_read_from_the_beginning_of_such_a_tile() -> None:
    shapes = [shape for dim in HEAD_DIMS for some in candidates(dim) for shape in some]
    keys = {shape.keys for shape in shapes} | {HeadsShape(64).keys}
    keys |= {HopperShape(dim).keys for dim in HOPPER_HEAD_DIMS}
    assert all(TILE_TOKENS % count == 0 for count in keys)
