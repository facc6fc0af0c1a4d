"""Tables grow into free blocks, share what is equal, and never write where another one reads."""

from __future__ import annotations

import pytest

from inflight.core.sequence import Sequence
from inflight.kv.block_pool import BlockPool
from inflight.kv.block_tables import BlockTables
from inflight.kv.layout import KVTable, KVTables
from scheduling import beam_search, prompt, sequence

SIZE = 4


# Blocks of 8 tokens that are all kept, and of 4 tokens in a window of 6.
WINDOWED = (KVTable(kernel_blocks=2), KVTable(window=6, tile_tokens=2))


def make_tables(
    num_blocks: int = 16,
    enable_prefix_caching: bool = True,
    tables: tuple[KVTable, ...] = (KVTable(),),
) -> BlockTables:
    return BlockTables(BlockPool(num_blocks, SIZE), enable_prefix_caching, KVTables(tables, SIZE))


def admitted(tables: BlockTables, request_id: int, prompt_ids: list[int], **kw: int) -> Sequence:
    one = sequence(request_id, prompt_ids, **kw)
    assert tables.admit(one) == []
    return one


def compute(tables: BlockTables, one: Sequence) -> None:
    """As if a step had computed all its tokens, and was committed."""
    start, one.num_computed = one.num_computed, len(one.token_ids)
    tables.commit(one, start, one.num_computed)


def beams_of(tables: BlockTables, prompt_ids: list[int], width: int = 3) -> list[Sequence]:
    """The beams of a search that has chosen their first tokens: they share all blocks."""
    group = beam_search(1, prompt_ids, 4, stops=False, beam_width=width)
    assert tables.admit(group) == []
    (first,) = group.members
    first.num_computed = len(prompt_ids)
    beams = [first, *(first.fork(-number) for number in range(2, width + 1))]
    for number, beam in enumerate(beams):
        beam.token_ids.append(number)
    for beam in beams[1:]:
        tables.share(beam)
    group._members = tuple(beams)
    return beams


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize("width", [1, 3])
def test_an_admission_leaves_as_many_blocks_free_as_it_is_told(width: int) -> None:
    tables = make_tables(num_blocks=10)
    group = beam_search(1, prompt(8), 1, beam_width=width) if width > 1 else sequence(1, prompt(8))
    assert tables.admit(group, num_kept_free=9) is None
    assert tables.pool.num_free == 10
    assert tables.admit(group, num_kept_free=8) == []
    assert tables.pool.num_free == 8
    another = sequence(9, prompt(8, start=3))
    assert tables.num_reserved > 0
    assert tables.admit(another, num_kept_free=0) == [], "what is reserved fits as well"


def test_shared_blocks_are_those_that_others_own_at_the_admission() -> None:
    tables = make_tables()
    first = admitted(tables, 1, prompt(12))
    assert tables.num_shared(first) == 0
    compute(tables, first)
    second = admitted(tables, 2, [*prompt(8), 7, 7, 7, 7])
    assert tables.num_shared(second) == 2
    tables.free(first)
    tables.free(second)
    assert tables.num_shared(admitted(tables, 3, [*prompt(8), 9])) == 0, "cached, but of nobody"


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_all_known_tokens_get_their_blocks_at_once(num_tokens: int, num_blocks: int) -> None:
    one = admitted(make_tables(), 1, prompt(num_tokens))
    assert len(set(one.tables[0])) == num_blocks
    assert one.num_computed == 0


def test_a_computed_prefix_is_shared_and_not_computed_again() -> None:
    tables = make_tables()
    first = admitted(tables, 1, prompt(11))
    compute(tables, first)
    second = admitted(tables, 2, [*prompt(8), 250, 250])
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] not in first.tables[0]
    assert second.num_computed == 8


def test_where_all_is_cached_the_last_token_is_computed_in_a_copy() -> None:
    tables = make_tables()
    first = admitted(tables, 1, prompt(8))
    compute(tables, first)
    second = sequence(2, prompt(8))
    copies = tables.admit(second)
    assert copies == [(first.tables[0][1], second.tables[0][1])]
    assert second.num_computed == 7
    assert tables.pool.ref_count(first.tables[0][1]) == 2, "written to before the copy"


@pytest.mark.parametrize("computed", [True, False])
def test_nothing_is_shared_without_a_cache_or_before_it_is_computed(computed: bool) -> None:
    tables = make_tables(enable_prefix_caching=not computed)
    first = admitted(tables, 1, prompt(8))
    if computed:
        compute(tables, first)
    second = admitted(tables, 2, prompt(8))
    assert not set(first.tables[0]) & set(second.tables[0])


def test_a_failed_block_table_allocation_takes_no_blocks() -> None:
    tables = make_tables(num_blocks=3)
    one = sequence(1, prompt(13))
    assert tables.admit(one) is None
    assert one.tables == []
    assert (tables.pool.num_free, tables.num_reserved) == (3, 0)


def test_admission_reserves_a_block_for_each_sequence_that_grows() -> None:
    tables = make_tables(num_blocks=4)
    growing = admitted(tables, 1, prompt(4), max_tokens=2)
    admitted(tables, 2, prompt(2), max_tokens=2)  # its block takes all that it may get
    assert tables.num_reserved == 1
    assert tables.admit(sequence(3, prompt(5))) is None, "two blocks are free, one is promised"
    tables.append(growing)
    assert tables.num_reserved == 0, "its last token is never computed"
    assert tables.admit(sequence(4, prompt(4))) == []


# ---------------------------------------------------------------- growth


def test_drafts_use_free_blocks_but_no_reserved_ones() -> None:
    tables = make_tables(num_blocks=4)
    one = admitted(tables, 1, prompt(4), max_tokens=40)
    one.num_computed = 3
    admitted(tables, 2, prompt(4), max_tokens=40)
    assert tables.num_reserved == 2, "both free blocks"
    assert tables.reserve_for_drafts(one, 0) == 0
    assert tables.reserve_for_drafts(one, 6) == 0
    assert len(one.tables[0]) == 1


def test_drafts_go_as_far_as_they_fit() -> None:
    tables = make_tables(num_blocks=3)
    one = admitted(tables, 1, prompt(4), max_tokens=40)
    one.num_computed = 3
    assert tables.reserve_for_drafts(one, 2) == 2
    assert len(one.tables[0]) == 2, "no block more than they need"
    assert tables.reserve_for_drafts(one, 20) == 4
    assert (len(one.tables[0]), tables.pool.num_free) == (2, 1), "a block is promised: its own next"


# ---------------------------------------------------------------- beams


def test_of_beams_with_a_common_block_one_keeps_it_and_the_others_get_copies() -> None:
    tables = make_tables()
    beams = beams_of(tables, prompt(6))
    common = list(beams[0].tables[0])
    places = tables.beams_needing_blocks(beams)
    assert places == [(beams[1], 0, 1), (beams[2], 0, 1)]
    copies = tables.copy_on_write(places)
    assert copies == [(common[1], beam.tables[0][1]) for beam in beams[1:]]
    assert beams[0].tables[0] == common
    assert len({beam.tables[0][1] for beam in beams}) == 3
    assert all(beam.tables[0][0] == common[0] for beam in beams)
    assert tables.pool.ref_count(common[1]) == 1


def test_beams_at_the_end_of_a_block_get_new_ones_and_copy_nothing() -> None:
    tables = make_tables()
    beams = beams_of(tables, prompt(8))
    assert tables.copy_on_write(tables.beams_needing_blocks(beams)) == []
    assert len({beam.tables[0][2] for beam in beams}) == 3


def test_resumed_beams_allocate_common_blocks_once() -> None:
    tables = make_tables(enable_prefix_caching=False)
    beams = beams_of(tables, prompt(9))
    group = beams[0].group
    tables.free(group)
    assert tables.pool.num_free == 16
    assert tables.admit(group) == []
    assert [beam.tables[0][:2] for beam in beams] == [beams[0].tables[0][:2]] * 3
    assert tables.pool.num_free == 16 - 2 - 3


# ---------------------------------------------------------------- the end


def test_a_preempted_sequences_blocks_stay_in_the_prefix_cache() -> None:
    tables = make_tables(num_blocks=3)
    one = admitted(tables, 1, prompt(9), max_tokens=9)
    compute(tables, one)
    tables.free(one)
    assert (one.tables[0], one.num_computed, one.generation) == ([], 0, 1)
    assert (tables.pool.num_free, tables.num_reserved) == (3, 0)
    assert tables.admit(one) == []
    assert one.num_computed == 8


def test_only_full_blocks_get_a_name() -> None:
    tables = make_tables()
    one = admitted(tables, 1, prompt(11))
    for start, end, num_named in ((0, 3, 0), (3, 5, 1), (5, 7, 1), (7, 8, 2), (8, 11, 2)):
        tables.commit(one, start, end)
        assert tables.pool.num_cached == num_named


# ---------------------------------------------------------------- windows


def test_blocks_outside_a_window_are_freed_as_a_sequence_goes_on() -> None:
    tables = make_tables(num_blocks=20, tables=WINDOWED)
    one = admitted(tables, 1, prompt(30), max_tokens=20)
    assert [len(table) for table in one.tables] == [4, 8]
    assert (tables.pool.num_free, one.capacity) == (20 - 12, 32)
    for end, first in ((5, 0), (9, 1), (12, 1), (13, 2), (30, 6)):
        tables.commit(one, one.num_computed, end)
        one.num_computed = end
        assert one.first_blocks == [0, first], "a query at `end` reads from end - 5 on"
        assert tables.pool.num_free == 20 - 12 + first
    tables.free(one)
    assert tables.pool.num_free == 20


def test_a_sequence_grows_in_the_table_that_is_full() -> None:
    tables = make_tables(tables=WINDOWED)
    one = admitted(tables, 1, prompt(4), max_tokens=40)
    counts = []
    for _ in range(4):
        counts.append(tables.num_to_append(one))
        free = tables.pool.num_free
        tables.append(one)
        assert tables.pool.num_free == free - counts[-1]
    assert counts == [1, 2, 1, 2]
    assert [len(table) for table in one.tables] == [3, 5]


def test_a_cached_prefix_needs_only_the_window_at_its_end() -> None:
    tables = make_tables(num_blocks=20, tables=WINDOWED)
    first = admitted(tables, 1, prompt(24))
    compute(tables, first)
    last_window = first.tables[1][4:]
    assert first.first_blocks == [0, 4]
    second = admitted(tables, 2, [*prompt(24), 250])
    assert second.num_computed == 24
    assert second.tables[0][:3] == first.tables[0]
    assert second.tables[1][4:6] == last_window
    assert second.first_blocks == [0, 4]


def test_a_prefix_whose_window_was_evicted_is_found_up_to_an_earlier_window() -> None:
    tables = make_tables(num_blocks=10, tables=WINDOWED)
    first = admitted(tables, 1, prompt(24))
    compute(tables, first)
    tables.free(first)
    keys = tables._keys(1, first.block_hashes, 0, 6)
    assert tables._num_cached_tokens(first.block_hashes) == 24
    del tables.pool._by_hash[keys[4]]  # as if it had been evicted
    assert tables._num_cached_tokens(first.block_hashes) == 16
    del tables.pool._by_hash[keys[3]]
    assert tables._num_cached_tokens(first.block_hashes) == 8
    del tables.pool._by_hash[keys[0]]
    assert tables._num_cached_tokens(first.block_hashes) == 0


def test_new_blocks_of_one_table_do_not_evict_the_prefix_in_another() -> None:
    tables = make_tables(num_blocks=30, tables=WINDOWED)
    first = admitted(tables, 1, prompt(24))
    compute(tables, first)
    tables.free(first)
    other = admitted(tables, 2, prompt(60, start=7))  # released later, so evicted later
    compute(tables, other)
    tables.free(other)
    longer = admitted(tables, 3, [*prompt(24), *prompt(60, start=99)])
    assert longer.num_computed == 24
    assert [len(table) for table in longer.tables] == [11, 21]
    owned = longer.tables[0] + longer.tables[1][longer.first_blocks[1] :]
    assert len(set(owned)) == len(owned)
    assert all(tables.pool.ref_count(block) == 1 for block in owned)


def test_where_all_is_cached_the_last_token_is_computed_in_a_copy_of_each_table() -> None:
    tables = make_tables(num_blocks=20, tables=WINDOWED)
    first = admitted(tables, 1, prompt(16))
    compute(tables, first)
    second = sequence(2, prompt(16))
    copies = tables.admit(second)
    assert copies == [
        (first.tables[0][1], second.tables[0][1]),
        (first.tables[1][3], second.tables[1][3]),
    ]
    assert second.num_computed == 15


def test_beams_get_blocks_of_their_own_in_each_table() -> None:
    tables = make_tables(num_blocks=30, tables=WINDOWED)
    beams = beams_of(tables, prompt(12), width=2)
    common = [list(table) for table in beams[0].tables]
    # The next token is in the second half of a longer block, and begins a shorter one.
    places = tables.beams_needing_blocks(beams)
    assert places == [(beams[0], 1, 3), (beams[1], 0, 1), (beams[1], 1, 3)]
    copies = tables.copy_on_write(places)
    assert copies == [(common[0][1], beams[1].tables[0][1])]
    assert beams[0].tables[0] == common[0]
    assert [beam.capacity for beam in beams] == [16, 16]
