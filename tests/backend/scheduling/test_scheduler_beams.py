"""The beams of a search are scheduled and preempted as a group, and share their blocks."""

from __future__ import annotations

import pytest

from fake_runner import PagedRunner, alone
from scheduling import (
    beam_search,
    best_outputs,
    prompt,
    scheduler,
    search_step,
    searched_alone,
    sequence,
)


@pytest.fixture
def fake() -> PagedRunner:
    return PagedRunner(block_size=4)


def test_beams_prefill_once_and_select_in_one_step(fake: PagedRunner) -> None:
    plan = scheduler()
    group = beam_search(1, [0] * 9, 4, stops=False, beam_width=3)
    plan.add(group)
    batches = [search_step(plan, fake, group) for _ in range(4)]
    assert [batch.num_tokens for batch in batches] == [9, 3, 3, 3]
    assert group.is_finished
    assert best_outputs(group) == searched_alone(group)
    assert plan.num_free_blocks == 16


def test_beams_share_blocks_until_they_write(fake: PagedRunner) -> None:
    plan = scheduler()
    group = beam_search(1, [0] * 10, 6, stops=False, beam_width=3)
    plan.add(group)
    search_step(plan, fake, group)
    assert plan.num_free_blocks == 13
    assert [beam.tables[0] for beam in list(group.members)] == [group.members[0].tables[0]] * 3
    batch = search_step(plan, fake, group)
    assert len(batch.copies) == 2, "one of three writes in place"
    assert {source for source, _ in batch.copies} == {batch.chunks[0].sequence.tables[0][2]}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_prefill_chunk", [2, 16])
def test_preempted_beams_recompute_their_common_prefix_once(
    fake: PagedRunner, enable_prefix_caching: bool, max_prefill_chunk: int
) -> None:
    plan = scheduler(
        enable_prefix_caching=enable_prefix_caching, max_prefill_chunk=max_prefill_chunk
    )
    group = beam_search(1, [0, 1] * 8, 7, stops=False, beam_width=3)
    plan.add(group)
    lost = 0
    while not group.is_finished:
        before = group.num_steps
        if before in (2, 4) and lost < before:
            plan.suspend(group)
            assert plan.num_free_blocks == 16
            if not enable_prefix_caching:  # nothing is found where it was by chance
                fake._tokens.clear()
            plan.resume(group)
            lost = before
            computed = 0
            while group.num_steps == before:
                computed += search_step(plan, fake, group).num_tokens
            # The prompt has full blocks; each beam has its own tokens after that.
            assert 3 * before <= computed <= 16 + 3 * before
            assert not enable_prefix_caching or computed == 3 * before
        else:
            search_step(plan, fake, group)
    assert best_outputs(group) == searched_alone(group)
    assert plan.num_free_blocks == 16


def test_a_beam_search_is_preempted_as_a_whole_with_the_same_result(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=16, max_num_seqs=8, enable_prefix_caching=False)
    olds = [sequence(one, prompt(8, start=one), max_tokens=20) for one in (3, 4)]
    group = beam_search(5, [0, 1] * 3, 12, stops=False, beam_width=3)
    for old in olds:
        plan.add(old)
    plan.add(group)
    while not group.is_finished:
        batch = plan.schedule()
        beams = [chunk.sequence for chunk in batch.chunks if chunk.sequence.beam_of is not None]
        assert not any(c.samples for c in batch.chunks if c.sequence in beams) or (
            beams == list(group.members)
        )
        committed = plan.commit(batch, fake.launch(batch).result())
        if found := [each for each in committed if each.sequence.beam_of is not None]:
            group.advance(found, plan)
        for old in olds:
            if old.num_output_tokens == 20:
                plan.finish(old)
    assert group.num_preemptions > 0
    for old in olds:
        assert old.token_ids[8:] == alone(old.token_ids[:8], old.num_output_tokens)
    assert best_outputs(group) == searched_alone(group)


def test_the_largest_search_that_fits_ends(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=11, enable_prefix_caching=False)
    group = beam_search(1, [0] * 8, 13, stops=False, beam_width=3)
    plan.add(group)
    while not group.is_finished:
        assert search_step(plan, fake, group).chunks
    assert group.num_preemptions == 0
    assert best_outputs(group) == searched_alone(group)
