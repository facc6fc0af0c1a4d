"""Tokens and blocks that each sequence gets in a step, case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fake_runner import PagedRunner, alone
from inflight.core.batch import Batch, StepOutput
from inflight.core.request import Request
from inflight.core.sequence import Sequence, Status
from inflight.errors import CapacityError, EngineError
from inflight.kv.layout import KVTables
from inflight.sampling.params import SamplingParams
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.waiting_queue import WaitingQueue
from scheduling import (
    Scores,
    lengths,
    prompt,
    rows_of,
    run_all,
    scheduler,
    scores_of,
    sequence,
    step,
)


@pytest.fixture
def fake() -> PagedRunner:
    return PagedRunner(block_size=4)


def test_a_request_runs_to_its_end_and_gives_everything_back(fake: PagedRunner) -> None:
    plan = scheduler()
    one = sequence(1, prompt(10), max_tokens=5)
    plan.add(one)
    run_all(plan, fake)
    assert one.token_ids[10:] == alone(prompt(10), 5)
    assert one.cumulative_logprob == -2.5
    assert one.status is Status.FINISHED
    assert plan.num_free_blocks == 16


def test_a_prompt_is_cut_to_the_budget(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(40)))
    assert [lengths(step(plan, fake))[1] for _ in range(4)] == [16, 16, 8, 1]


def test_a_prompt_is_cut_to_max_prefill_chunk(fake: PagedRunner) -> None:
    plan = scheduler(max_prefill_chunk=5)
    plan.add(sequence(1, prompt(12)))
    assert [lengths(step(plan, fake))[1] for _ in range(4)] == [5, 5, 2, 1]


def scored(request_id: int, prompt_ids: list[int], max_tokens: int = 4) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=0)
    return Sequence(Request(request_id, prompt_ids, params), max_tokens)


def test_a_prompt_that_is_scored_is_cut_to_the_rows(fake: PagedRunner) -> None:
    plan = scheduler(max_rows=6)
    one = scored(1, prompt(20))
    plan.add(one)
    scores = Scores()
    batches = [step(plan, fake, scores) for _ in range(5)]
    assert [lengths(batch)[1] for batch in batches] == [6, 6, 6, 2, 1]
    assert [rows_of(batch.chunks[0]) for batch in batches] == [6, 6, 6, 2, 1]
    assert [batch.chunks[0].num_scores for batch in batches] == [6, 6, 6, 1, 0]
    assert scores[one] == scores_of(one)


def test_prompt_logprobs_leave_logits_rows_and_token_budget_to_other_sequences(
    fake: PagedRunner,
) -> None:
    plan = scheduler(max_rows=6, max_num_batched_tokens=16)
    plan.add(sequence(1, prompt(4), max_tokens=9))
    step(plan, fake)
    plan.add(scored(2, prompt(20, start=1)))
    plan.add(sequence(3, prompt(20, start=2)))
    batch = step(plan, fake)
    assert lengths(batch) == {1: 1, 2: 4, 3: 11}, (
        "three of the six rows are the others' and its own"
    )
    assert sum(max(1, rows_of(chunk)) for chunk in batch.chunks) == 6


def test_of_two_prompts_that_are_scored_the_first_has_the_spare_rows(fake: PagedRunner) -> None:
    plan = scheduler(max_rows=6)
    plan.add(scored(1, prompt(20)))
    plan.add(scored(2, prompt(20, start=1)))
    assert lengths(step(plan, fake)) == {1: 5, 2: 1}
    run_all(plan, fake)


def test_tokens_with_prompt_logprobs_are_not_taken_from_the_prefix_cache(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(12)))
    run_all(plan, fake)
    one = scored(2, prompt(12))
    plan.add(one)
    scores = Scores()
    run_all(plan, fake, scores=scores)
    assert one.num_cached_tokens == 0
    assert scores[one] == scores_of(one)


def test_a_preempted_sequence_continues_where_its_prompt_logprobs_end(fake: PagedRunner) -> None:
    """Up to there the prefix cache may help, and rows are not needed."""
    plan = scheduler(max_rows=7)
    one = scored(1, prompt(24))
    plan.add(one)
    scores = Scores()
    step(plan, fake, scores)
    step(plan, fake, scores)
    assert one.num_scored == 15
    plan.suspend(one)
    plan.resume(one)
    (chunk,) = step(plan, fake, scores).chunks
    assert (chunk.start, chunk.length, chunk.num_scores) == (12, 9, 7)
    run_all(plan, fake, scores=scores)
    assert scores[one] == scores_of(one)


def test_decode_continues_during_a_long_prefill(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(4), max_tokens=8))
    step(plan, fake)
    plan.add(sequence(2, prompt(40, start=9)))
    assert [lengths(step(plan, fake)) for _ in range(3)] == [
        {1: 1, 2: 15},
        {1: 1, 2: 15},
        {1: 1, 2: 10},
    ]


def test_a_short_prompt_does_not_wait_for_a_long_one(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(40)))
    plan.add(sequence(2, prompt(6, start=9)))
    assert lengths(step(plan, fake)) == {1: 10, 2: 6}
    assert lengths(step(plan, fake)) == {2: 1, 1: 15}


def test_budget_that_a_blocked_head_cannot_use_goes_to_the_first(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=11)
    plan.add(sequence(1, prompt(36)))
    plan.add(sequence(2, prompt(36, start=9)))
    assert lengths(step(plan, fake)) == {1: 16}


def test_no_sequence_overtakes_the_head_of_the_queue(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=8)
    plan.add(sequence(1, prompt(20)))
    plan.add(sequence(2, prompt(20, start=9)))
    plan.add(sequence(3, prompt(1)))
    step(plan, fake)
    assert [waiting.request_id for waiting in plan.waiting] == [2, 3]


def test_at_most_max_num_seqs_sequences_run(fake: PagedRunner) -> None:
    plan = scheduler(max_num_seqs=2)
    for request_id in range(5):
        plan.add(sequence(request_id, prompt(2, start=request_id)))
    step(plan, fake)
    assert [running.request_id for running in plan.running] == [0, 1]
    assert len(plan.waiting) == 3


def test_a_budget_below_the_number_of_sequences_starves_none(fake: PagedRunner) -> None:
    plan = scheduler(max_num_seqs=8, max_num_batched_tokens=2)
    for request_id in range(4):
        plan.add(sequence(request_id, prompt(3, start=request_id)))
    while plan.running or plan.waiting:
        batch = step(plan, fake)
        assert 1 <= batch.num_tokens <= 2
        assert len(plan.running) <= 2


def test_a_full_queue_refuses_and_keeps_what_it_has(fake: PagedRunner) -> None:
    plan = scheduler(WaitingQueue(max_waiting=2))
    plan.add(sequence(1, prompt(3)))
    plan.add(sequence(2, prompt(3)))
    with pytest.raises(CapacityError, match="max_waiting is 2"):
        plan.add(sequence(3, prompt(3)))
    step(plan, fake)
    plan.add(sequence(3, prompt(3)))
    assert len(plan.waiting) == 1


@pytest.mark.parametrize("length", range(1, 8))
def test_a_request_that_fills_the_pool_to_the_last_slot_ends(
    fake: PagedRunner, length: int
) -> None:
    plan = scheduler(num_blocks=2)
    for request_id in (1, 2):  # the second finds its prompt in the cache
        one = sequence(request_id, prompt(length), max_tokens=8 - length)
        plan.add(one)
        run_all(plan, fake)
        assert one.token_ids[length:] == alone(prompt(length), 8 - length)


def test_a_common_prefix_is_computed_once(fake: PagedRunner) -> None:
    plan = scheduler(max_num_batched_tokens=32)
    plan.add(sequence(1, prompt(14)))
    run_all(plan, fake)
    two = sequence(2, [*prompt(14), 7, 7])
    plan.add(two)
    assert lengths(step(plan, fake)) == {2: 4}
    assert two.num_cached_tokens == 12
    assert (plan.num_prompt_tokens, plan.num_cached_tokens) == (30, 12)


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat(fake: PagedRunner) -> None:
    plan = scheduler(max_num_batched_tokens=32)
    one = sequence(1, prompt(6), max_tokens=8)
    plan.add(one)
    run_all(plan, fake)
    two = sequence(2, [*one.token_ids, 7, 7])
    plan.add(two)
    run_all(plan, fake)
    assert two.num_cached_tokens == 12
    assert two.token_ids[16:] == alone(two.request.prompt_ids, 4)


def test_a_prompt_that_is_cached_whole_writes_into_a_copy(fake: PagedRunner) -> None:
    plan = scheduler()
    one, two = sequence(1, prompt(8)), sequence(2, prompt(8))
    plan.add(one)
    step(plan, fake)
    plan.add(two)
    batch = plan.schedule()
    assert lengths(batch) == {1: 1, 2: 1}
    assert batch.copies == [(one.tables[0][1], two.tables[0][1])]
    assert one.tables[0][0] == two.tables[0][0]
    assert one.tables[0][1] != two.tables[0][1]
    plan.commit(batch, fake.launch(batch).result())
    run_all(plan, fake)
    assert one.token_ids == two.token_ids
    assert two.num_cached_tokens == 7


def test_a_different_salt_shares_no_prefix(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(8), cache_salt="a"))
    run_all(plan, fake)
    two = sequence(2, prompt(8), cache_salt="b")
    plan.add(two)
    step(plan, fake)
    assert two.num_cached_tokens == 0


def test_without_the_prefix_cache_nothing_is_shared(fake: PagedRunner) -> None:
    plan = scheduler(enable_prefix_caching=False)
    for request_id in (1, 2):
        plan.add(sequence(request_id, prompt(8)))
        run_all(plan, fake)
    assert plan.num_cached_tokens == 0


def crowded() -> tuple[Scheduler, list[Sequence]]:
    """Three sequences that fit when they start and not when they have grown."""
    plan = scheduler(num_blocks=9, max_num_batched_tokens=32, max_num_seqs=3)
    crowd = [sequence(i, prompt(3, start=i), max_tokens=20) for i in range(3)]
    for one in crowd:
        plan.add(one)
    return plan, crowd


def test_the_most_recently_admitted_sequence_is_preempted_and_completes(fake: PagedRunner) -> None:
    plan, crowd = crowded()
    run_all(plan, fake)
    for one in crowd:
        assert one.token_ids[3:] == alone(one.request.prompt_ids, 20)
    assert crowd[0].num_preemptions == 0
    assert crowd[2].num_preemptions > 0
    assert plan.num_preemptions == sum(one.num_preemptions for one in crowd)


def test_a_preempted_sequence_heads_the_queue_and_sits_out_the_step(fake: PagedRunner) -> None:
    plan, crowd = crowded()
    while not plan.num_preemptions:
        batch = step(plan, fake)
    assert 2 not in lengths(batch)
    assert next(iter(plan.waiting)) is crowd[2]
    assert crowd[2].tables[0] == []
    assert crowd[2].num_output_tokens > 0, "its tokens are kept"


def test_a_preempted_sequence_sits_out_the_step_even_if_it_would_fit(fake: PagedRunner) -> None:
    """Twins own a copy each of the same content, so the one that yields could share at once."""
    plan = scheduler(num_blocks=9, max_num_batched_tokens=32)
    one, twin = sequence(1, prompt(8), max_tokens=20), sequence(2, prompt(8), max_tokens=20)
    plan.add(one)
    plan.add(twin)
    while not plan.num_preemptions:
        batch = step(plan, fake)
    assert lengths(batch) == {1: 1}
    assert len(step(plan, fake).chunks) == 2
    assert twin.tables[0][:4] == one.tables[0][:4]
    run_all(plan, fake)
    assert one.token_ids == twin.token_ids == prompt(8) + alone(prompt(8), 20)


def test_prompt_tokens_are_counted_once_however_often_one_runs(fake: PagedRunner) -> None:
    plan, crowd = crowded()
    run_all(plan, fake)
    assert plan.num_prompt_tokens == 9
    assert plan.num_cached_tokens == sum(one.num_cached_tokens for one in crowd) == 0


def test_admission_reserves_a_block_for_each_growing_sequence(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=4, max_num_batched_tokens=32)
    plan.add(sequence(1, prompt(4), max_tokens=12))
    plan.add(sequence(2, prompt(12, start=9), max_tokens=1))
    assert lengths(step(plan, fake)) == {1: 4}


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_finish_frees_in_every_state_and_twice_is_once(fake: PagedRunner, after: int) -> None:
    plan = scheduler(max_num_batched_tokens=4)
    one = sequence(1, prompt(10), max_tokens=8)
    plan.add(one)
    for _ in range(after):
        step(plan, fake)
    plan.finish(one)
    plan.finish(one)
    assert one.status is Status.FINISHED
    assert not plan.running and not plan.waiting
    assert plan.num_free_blocks == 16


def test_finishing_an_ended_sequence_leaves_a_namesake_alone() -> None:
    plan = scheduler()
    old, new = sequence(1, prompt(3)), sequence(1, prompt(3))
    plan.add(old)
    plan.finish(old)
    plan.add(new)
    plan.finish(old)
    assert list(plan.waiting) == [new]


def test_a_namesake_of_an_ended_sequence_counts_anew(fake: PagedRunner) -> None:
    plan = scheduler()
    for _ in range(2):
        plan.add(sequence(1, prompt(3)))
        run_all(plan, fake)
    assert plan.num_prompt_tokens == 6


def test_a_suspended_sequence_returns_with_its_prefix_from_the_cache(fake: PagedRunner) -> None:
    plan = scheduler()
    one = sequence(1, prompt(10), max_tokens=6)
    plan.add(one)
    for _ in range(4):
        step(plan, fake)
    plan.suspend(one)
    assert one.status is Status.SUSPENDED
    assert list(plan.suspended) == [one]
    assert plan.num_free_blocks == 16
    assert plan.schedule() == Batch([])
    plan.resume(one)
    assert lengths(step(plan, fake)) == {1: len(one.token_ids) - 1 - 12}
    run_all(plan, fake)
    assert one.token_ids[10:] == alone(prompt(10), 6)
    assert one.num_cached_tokens == 0, "of its first admission"
    assert plan.num_preemptions == 0


def test_a_waiting_sequence_can_be_suspended_and_returns_first() -> None:
    plan = scheduler()
    one, two = sequence(1, prompt(3)), sequence(2, prompt(3))
    plan.add(one)
    plan.add(two)
    plan.suspend(two)
    plan.suspend(two)
    assert list(plan.waiting) == [one]
    plan.resume(two)
    plan.resume(two)
    assert list(plan.waiting) == [two, one]


def test_suspending_or_resuming_a_finished_sequence_does_nothing() -> None:
    plan = scheduler()
    one = sequence(1, prompt(3))
    plan.add(one)
    plan.finish(one)
    plan.suspend(one)
    plan.resume(one)
    assert one.status is Status.FINISHED
    assert not plan.suspended and not plan.waiting


@pytest.mark.parametrize("leave", [Scheduler.finish, Scheduler.suspend])
def test_results_of_a_sequence_that_left_meanwhile_are_ignored(
    fake: PagedRunner, leave: Callable[[Scheduler, Sequence], None]
) -> None:
    plan = scheduler()
    one, two = sequence(1, prompt(3)), sequence(2, prompt(3, start=5))
    plan.add(one)
    plan.add(two)
    batch = plan.schedule()
    output = fake.launch(batch).result()
    leave(plan, one)
    assert [each.sequence for each in plan.commit(batch, output)] == [two]
    assert (one.num_output_tokens, one.num_computed) == (0, 0)


def test_a_failed_sequence_stays_where_it_was(fake: PagedRunner) -> None:
    plan = scheduler()
    one, two = sequence(1, prompt(3)), sequence(2, prompt(3, start=5))
    plan.add(one)
    plan.add(two)
    batch = plan.schedule()
    output = fake.launch(batch).result()
    output.errors[0] = "numerical"
    assert [each.sequence for each in plan.commit(batch, output)] == [two]
    assert one.num_output_tokens == 0
    plan.finish(one)
    run_all(plan, fake)
    assert two.token_ids[3:] == alone(two.request.prompt_ids, 4)


@pytest.mark.parametrize("token_ids", [[], [5, 6]])
def test_a_runner_returning_no_token_or_too_many_is_an_error(token_ids: list[int]) -> None:
    plan = scheduler()
    plan.add(sequence(7, prompt(3)))
    batch = plan.schedule()
    with pytest.raises(EngineError, match=f"returned {len(token_ids)} tokens for request 7"):
        plan.commit(batch, StepOutput([token_ids], [[]]))


def test_a_storm_of_cancels_costs_the_same_for_each() -> None:
    """The queue is a dictionary: were it a list, this would take minutes."""
    plan = scheduler(WaitingQueue(max_waiting=100_000))
    queue = [sequence(i, [1, 2]) for i in range(100_000)]
    for one in queue:
        plan.add(one)
    for one in reversed(queue):
        plan.finish(one)
    assert not plan.waiting


# ---------------------------------------------------------------- steps ahead


def lockstep(request_id: int, prompt_ids: list[int], max_tokens: int) -> Sequence:
    """A sequence whose next token can only be sampled once the host has all tokens."""
    request = Request(request_id, prompt_ids, SamplingParams())
    return Sequence(request, max_tokens, bad_word_ids=((250, 251),))


def test_a_token_in_flight_counts_for_the_next_step() -> None:
    plan = scheduler()
    one = sequence(1, prompt(6))
    plan.add(one)
    first, second = plan.schedule(), plan.schedule()
    assert [(c.start, c.length, c.samples) for c in first.chunks] == [(0, 6, True)]
    assert [(c.start, c.length, c.samples) for c in second.chunks] == [(6, 1, True)]
    assert (one.num_in_flight, one.num_tokens, one.num_uncomputed) == (2, 8, 1)
    plan.commit(first, StepOutput([[5]], [[-1.0]]))
    assert (one.num_in_flight, one.num_tokens, one.num_output_tokens) == (1, 8, 1)


def test_a_sequence_with_its_last_token_in_flight_waits() -> None:
    plan = scheduler()
    one = sequence(1, prompt(6), max_tokens=2)
    plan.add(one)
    batches = [plan.schedule(), plan.schedule()]
    assert plan.schedule() == Batch([])
    for batch in batches:
        plan.commit(batch, StepOutput([[5]], [[-1.0]]))
    assert one.num_output_tokens == 2


def test_only_multi_token_bad_words_need_committed_tokens() -> None:
    request = Request(1, [1], SamplingParams())
    assert not Sequence(request, 4, bad_word_ids=((1,), (2,))).needs_committed_tokens
    assert Sequence(request, 4, bad_word_ids=((1,), (2, 3))).needs_committed_tokens


def test_a_sequence_needing_committed_tokens_runs_every_other_step_without_delaying_others() -> (
    None
):
    plan = scheduler(max_num_seqs=3)
    plan.add(lockstep(1, prompt(3), max_tokens=9))
    plan.add(sequence(2, prompt(3, start=5), max_tokens=9))
    fake = PagedRunner(steps_ahead=1)
    batch = plan.schedule()
    pending = fake.launch(batch)
    ran = []
    for _ in range(4):
        following = plan.schedule()
        ran.append(list(lengths(following)))
        late = fake.launch(following)
        plan.commit(batch, pending.result())
        batch, pending = following, late
    assert ran == [[2], [1, 2], [2], [1, 2]]


def test_waiting_sequences_keep_their_place_in_the_budget() -> None:
    """Those that sit out a step may all want a token in the next one."""
    plan = scheduler(max_num_seqs=8, max_num_batched_tokens=2)
    for request_id in range(4):
        plan.add(lockstep(request_id, [request_id], max_tokens=3))
    assert plan.schedule().num_tokens == 2
    assert plan.schedule() == Batch([])
    assert len(plan.running) == 2


def test_results_of_an_earlier_life_are_ignored_even_if_it_runs_again(fake: PagedRunner) -> None:
    plan = scheduler()
    one = sequence(1, prompt(6))
    plan.add(one)
    old = plan.schedule()
    plan.suspend(one)
    plan.resume(one)
    new = plan.schedule()
    assert lengths(new) == {1: 6}
    assert plan.commit(old, StepOutput([[9]], [[-1.0]])) == []
    assert (one.num_output_tokens, one.num_in_flight) == (0, 1)
    committed = plan.commit(new, fake.launch(new).result())
    assert [each.sequence for each in committed] == [one]
    assert one.token_ids[6:] == alone(prompt(6), 1)


def test_a_block_that_a_dropped_step_filled_gets_no_name() -> None:
    plan = scheduler()
    one = sequence(1, prompt(7), max_tokens=9)
    plan.add(one)
    first, stale = plan.schedule(), plan.schedule()  # the second fills the second block
    plan.commit(first, StepOutput([[5]], [[-1.0]]))
    plan.finish(one)
    plan.commit(stale, StepOutput([[6]], [[-1.0]]))
    two = sequence(2, [*prompt(7), 5, 1, 1])
    plan.add(two)
    assert plan.schedule().chunks[0].start == 4


def test_no_block_is_read_and_written_by_the_copies_of_one_step(fake: PagedRunner) -> None:
    """The pool's last free block is the one that the first of two admissions copies from."""
    plan = scheduler(num_blocks=5)
    first, second = prompt(4), prompt(4, start=9)
    for request_id, prompt_ids in enumerate([first, second]):
        plan.add(sequence(request_id, prompt_ids, max_tokens=1))
    run_all(plan, fake)
    holder = sequence(2, [*second, *prompt(7, start=3)], max_tokens=1)
    plan.add(holder)
    batch = plan.schedule()
    plan.commit(batch, fake.launch(batch).result())
    plan.add(sequence(3, first, max_tokens=1))
    plan.add(sequence(4, second, max_tokens=1))
    copies = plan.schedule().copies
    assert len(copies) == 1
    assert not {source for source, _ in copies} & {target for _, target in copies}


def growing(request_id: int, max_tokens: int) -> Sequence:
    """Only its limit ends it."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(Request(request_id, prompt(4, start=request_id), params), max_tokens)


def test_an_admission_waits_for_the_growth_of_those_that_run(fake: PagedRunner) -> None:
    """Both fit into 16 blocks of 4 tokens now, but not at their ends."""
    plan = scheduler(forecast=KVForecast(KVTables.single(4), 4, max_blocks=16))
    plan.add(growing(1, 40))
    plan.add(growing(2, 40))
    step(plan, fake)
    assert [one.request_id for one in plan.running] == [1]
    assert plan.lacks_blocks
    run_all(plan, fake)
    assert plan.num_preemptions == 0


def test_if_nothing_runs_no_blocks_are_kept_for_growth(fake: PagedRunner) -> None:
    plan = scheduler(forecast=KVForecast(KVTables.single(4), 4, max_blocks=16))
    plan.add(growing(1, 60))
    run_all(plan, fake)
    assert plan.num_preemptions == 0
