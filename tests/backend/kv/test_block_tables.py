"""Tables grow into free blocks, share what is equal, and never write where another one reads."""

from __future__ import annotations

import pytest

from inflight.core.sequence import Sequence
from inflight.kv.block_pool import BlockPool
from inflight.kv.block_tables import BlockTables
from scheduling import beam_search, prompt, sequence

SIZE = 4


def make_tables(num_blocks: int = 16, enable_prefix_caching: bool = True) -> BlockTables:
    return BlockTables(BlockPool(num_blocks, SIZE), enable_prefix_caching)


def admitted(tables: BlockTables, request_id: int, prompt_ids: list[int], **kw: int) -> Sequence:
    one = sequence(request_id, prompt_ids, **kw)
    assert tables.admit(one) == []
    return one


def compute(tables: BlockTables, one: Sequence) -> None:
    """As if a step had computed all its tokens, and was committed."""
    start, one.num_computed = one.num_computed, len(one.token_ids)
    tables.register_prefix(one, start, one.num_computed)


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
        tables.pool.share(beam.blocks)
    group._members = tuple(beams)
    return beams


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_all_known_tokens_get_their_blocks_at_once(num_tokens: int, num_blocks: int) -> None:
    one = admitted(make_tables(), 1, prompt(num_tokens))
    assert len(set(one.blocks)) == num_blocks
    assert one.num_computed == 0


def test_a_computed_prefix_is_shared_and_not_computed_again() -> None:
    tables = make_tables()
    first = admitted(tables, 1, prompt(11))
    compute(tables, first)
    second = admitted(tables, 2, [*prompt(8), 250, 250])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    assert second.num_computed == 8


def test_where_all_is_cached_the_last_token_is_computed_in_a_copy() -> None:
    tables = make_tables()
    first = admitted(tables, 1, prompt(8))
    compute(tables, first)
    second = sequence(2, prompt(8))
    copies = tables.admit(second)
    assert copies == [(first.blocks[1], second.blocks[1])]
    assert second.num_computed == 7
    assert tables.pool.ref_count(first.blocks[1]) == 2, "written to before the copy"


@pytest.mark.parametrize("computed", [True, False])
def test_nothing_is_shared_without_a_cache_or_before_it_is_computed(computed: bool) -> None:
    tables = make_tables(enable_prefix_caching=not computed)
    first = admitted(tables, 1, prompt(8))
    if computed:
        compute(tables, first)
    second = admitted(tables, 2, prompt(8))
    assert not set(first.blocks) & set(second.blocks)


def test_a_failed_block_table_allocation_takes_no_blocks() -> None:
    tables = make_tables(num_blocks=3)
    one = sequence(1, prompt(13))
    assert tables.admit(one) is None
    assert one.blocks == []
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
    assert len(one.blocks) == 1


def test_drafts_go_as_far_as_they_fit() -> None:
    tables = make_tables(num_blocks=3)
    one = admitted(tables, 1, prompt(4), max_tokens=40)
    one.num_computed = 3
    assert tables.reserve_for_drafts(one, 2) == 2
    assert len(one.blocks) == 2, "no block more than they need"
    assert tables.reserve_for_drafts(one, 20) == 4
    assert (len(one.blocks), tables.pool.num_free) == (2, 1), "a block is promised: its own next"


# ---------------------------------------------------------------- beams


def test_of_beams_with_a_common_block_one_keeps_it_and_the_others_get_copies() -> None:
    tables = make_tables()
    beams = beams_of(tables, prompt(6))
    common = list(beams[0].blocks)
    places = tables.beams_needing_blocks(beams)
    assert places == [(beams[1], 1), (beams[2], 1)]
    copies = tables.copy_on_write(places)
    assert copies == [(common[1], beam.blocks[1]) for beam in beams[1:]]
    assert beams[0].blocks == common
    assert len({beam.blocks[1] for beam in beams}) == 3
    assert all(beam.blocks[0] == common[0] for beam in beams)
    assert tables.pool.ref_count(common[1]) == 1


def test_beams_at_the_end_of_a_block_get_new_ones_and_copy_nothing() -> None:
    tables = make_tables()
    beams = beams_of(tables, prompt(8))
    assert tables.copy_on_write(tables.beams_needing_blocks(beams)) == []
    assert len({beam.blocks[2] for beam in beams}) == 3


def test_resumed_beams_allocate_common_blocks_once() -> None:
    tables = make_tables(enable_prefix_caching=False)
    beams = beams_of(tables, prompt(9))
    group = beams[0].group
    tables.free(group)
    assert tables.pool.num_free == 16
    assert tables.admit(group) == []
    assert [beam.blocks[:2] for beam in beams] == [beams[0].blocks[:2]] * 3
    assert tables.pool.num_free == 16 - 2 - 3


# ---------------------------------------------------------------- the end


def test_a_preempted_sequences_blocks_stay_in_the_prefix_cache() -> None:
    tables = make_tables(num_blocks=3)
    one = admitted(tables, 1, prompt(9), max_tokens=9)
    compute(tables, one)
    tables.free(one)
    assert (one.blocks, one.num_computed, one.generation) == ([], 0, 1)
    assert (tables.pool.num_free, tables.num_reserved) == (3, 0)
    assert tables.admit(one) == []
    assert one.num_computed == 8


def test_only_full_blocks_get_a_name() -> None:
    tables = make_tables()
    one = admitted(tables, 1, prompt(11))
    for start, end, num_named in ((0, 3, 0), (3, 5, 1), (5, 7, 1), (7, 8, 2), (8, 11, 2)):
        tables.register_prefix(one, start, end)
        assert tables.pool.num_cached == num_named
