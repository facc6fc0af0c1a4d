"""Whatever the pool, the budget and the crowd: each request gets the tokens that it gets alone."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fake_runner import NUM_NAMED, LateStep, PagedRunner, alone, next_token, score
from inflight.batch import Batch, Chunk, StepOutput
from inflight.beams import BeamGroup
from inflight.errors import CapacityError, EngineError, RequestError
from inflight.output import OutputStage
from inflight.request import Candidate, Request
from inflight.sampling import SamplingParams
from inflight.scheduler import Scheduler
from inflight.sequence import Sequence, Status


def sequence(
    request_id: int, prompt_ids: list[int], max_tokens: int = 4, cache_salt: str = ""
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(Request(request_id, prompt_ids, params, cache_salt), max_tokens)


def scheduler(**changes: int | bool) -> Scheduler:
    settings: dict[str, int | bool] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_batch_tokens": 16,
    }
    return Scheduler(**(settings | changes))  # type: ignore[arg-type]


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i * i) % 251 for i in range(length)]


def step(scheduler: Scheduler, fake: PagedRunner) -> Batch:
    """One turn of the engine's loop, which ends sequences at max_tokens."""
    batch = scheduler.schedule()
    for moved in scheduler.commit(batch, fake.launch(batch).result()):
        if moved.num_output_tokens == moved.max_tokens:
            scheduler.finish(moved)
    return batch


def run_all(scheduler: Scheduler, fake: PagedRunner, max_steps: int = 1000) -> int:
    """Steps until nothing runs or waits."""
    for num_steps in range(max_steps):
        if not scheduler.running and not scheduler.waiting:
            return num_steps
        assert step(scheduler, fake).chunks, "work, but no progress"
    raise AssertionError(f"not done after {max_steps} steps")


def lengths(batch: Batch) -> dict[int, int]:
    return {chunk.sequence.request_id: chunk.length for chunk in batch.chunks}


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
    batches = [step(plan, fake) for _ in range(5)]
    assert [lengths(batch)[1] for batch in batches] == [6, 6, 6, 2, 1]
    assert [rows_of(batch.chunks[0]) for batch in batches] == [6, 6, 6, 2, 1]
    assert [batch.chunks[0].num_scores for batch in batches] == [6, 6, 6, 1, 0]
    assert one.prompt_candidates == scores_of(one)


def test_a_prompt_that_is_scored_leaves_others_their_rows_and_the_tokens_that_it_cannot_use(
    fake: PagedRunner,
) -> None:
    plan = scheduler(max_rows=6, max_batch_tokens=16)
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


def test_what_is_scored_is_not_taken_from_the_prefix_cache(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(12)))
    run_all(plan, fake)
    one = scored(2, prompt(12))
    plan.add(one)
    run_all(plan, fake)
    assert one.num_cached_tokens == 0
    assert one.prompt_candidates == scores_of(one)


def test_who_lost_its_blocks_goes_on_where_its_scores_end(fake: PagedRunner) -> None:
    """Up to there the prefix cache may help, and rows are not needed."""
    plan = scheduler(max_rows=7)
    one = scored(1, prompt(24))
    plan.add(one)
    step(plan, fake)
    step(plan, fake)
    assert one.num_scored == 15
    plan.suspend(one)
    plan.resume(one)
    (chunk,) = step(plan, fake).chunks
    assert (chunk.start, chunk.length, chunk.num_scores) == (12, 9, 7)
    run_all(plan, fake)
    assert one.prompt_candidates == scores_of(one)


def test_decode_goes_on_while_a_long_prompt_is_read(fake: PagedRunner) -> None:
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


def test_nobody_passes_the_head_of_the_queue(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=8)
    plan.add(sequence(1, prompt(20)))
    plan.add(sequence(2, prompt(20, start=9)))
    plan.add(sequence(3, prompt(1)))
    step(plan, fake)
    assert [waiting.request_id for waiting in plan.waiting] == [2, 3]


def test_no_more_sequences_run_than_there_are_seats(fake: PagedRunner) -> None:
    plan = scheduler(max_num_seqs=2)
    for request_id in range(5):
        plan.add(sequence(request_id, prompt(2, start=request_id)))
    step(plan, fake)
    assert [running.request_id for running in plan.running] == [0, 1]
    assert len(plan.waiting) == 3


def test_a_budget_smaller_than_the_seats_starves_nobody(fake: PagedRunner) -> None:
    plan = scheduler(max_num_seqs=8, max_batch_tokens=2)
    for request_id in range(4):
        plan.add(sequence(request_id, prompt(3, start=request_id)))
    while plan.running or plan.waiting:
        batch = step(plan, fake)
        assert 1 <= batch.num_tokens <= 2
        assert len(plan.running) <= 2


def test_a_request_beyond_the_pool_is_refused_with_what_fits() -> None:
    plan = scheduler(num_blocks=4)
    with pytest.raises(RequestError, match=r"prompt of 10 tokens and max_tokens of 7 .* at most 6"):
        plan.add(sequence(1, prompt(10), max_tokens=7))
    with pytest.raises(RequestError, match="a prompt of at most 15 fits"):
        plan.add(sequence(1, prompt(16), max_tokens=1))
    plan.add(sequence(1, prompt(10), max_tokens=6))
    assert [waiting.request_id for waiting in plan.waiting] == [1]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="input_ids: the prompt has no tokens"):
        scheduler().add(sequence(1, []))


def test_a_full_queue_refuses_and_keeps_what_it_has(fake: PagedRunner) -> None:
    plan = scheduler(max_waiting=2)
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
    plan = scheduler(max_batch_tokens=32)
    plan.add(sequence(1, prompt(14)))
    run_all(plan, fake)
    two = sequence(2, [*prompt(14), 7, 7])
    plan.add(two)
    assert lengths(step(plan, fake)) == {2: 4}
    assert two.num_cached_tokens == 12
    assert (plan.num_prompt_tokens, plan.num_cached_tokens) == (30, 12)


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat(fake: PagedRunner) -> None:
    plan = scheduler(max_batch_tokens=32)
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
    assert batch.copies == [(one.blocks[1], two.blocks[1])]
    assert one.blocks[0] == two.blocks[0]
    assert one.blocks[1] != two.blocks[1]
    plan.commit(batch, fake.launch(batch).result())
    run_all(plan, fake)
    assert one.token_ids == two.token_ids
    assert two.num_cached_tokens == 7


def test_another_salt_shares_nothing(fake: PagedRunner) -> None:
    plan = scheduler()
    plan.add(sequence(1, prompt(8), cache_salt="a"))
    run_all(plan, fake)
    two = sequence(2, prompt(8), cache_salt="b")
    plan.add(two)
    step(plan, fake)
    assert two.num_cached_tokens == 0


def test_without_the_prefix_cache_nothing_is_shared(fake: PagedRunner) -> None:
    plan = scheduler(prefix_cache=False)
    for request_id in (1, 2):
        plan.add(sequence(request_id, prompt(8)))
        run_all(plan, fake)
    assert plan.num_cached_tokens == 0


def crowded() -> tuple[Scheduler, list[Sequence]]:
    """Three sequences that fit when they start and not when they have grown."""
    plan = scheduler(num_blocks=9, max_batch_tokens=32, max_num_seqs=3)
    crowd = [sequence(i, prompt(3, start=i), max_tokens=20) for i in range(3)]
    for one in crowd:
        plan.add(one)
    return plan, crowd


def test_the_youngest_yields_and_still_gets_its_tokens(fake: PagedRunner) -> None:
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
    assert crowd[2].blocks == []
    assert crowd[2].num_output_tokens > 0, "its tokens are kept"


def test_a_preempted_sequence_sits_out_the_step_even_if_it_would_fit(fake: PagedRunner) -> None:
    """Twins own a copy each of the same content, so the one that yields could share at once."""
    plan = scheduler(num_blocks=9, max_batch_tokens=32)
    one, twin = sequence(1, prompt(8), max_tokens=20), sequence(2, prompt(8), max_tokens=20)
    plan.add(one)
    plan.add(twin)
    while not plan.num_preemptions:
        batch = step(plan, fake)
    assert lengths(batch) == {1: 1}
    assert len(step(plan, fake).chunks) == 2
    assert twin.blocks[:4] == one.blocks[:4]
    run_all(plan, fake)
    assert one.token_ids == twin.token_ids == prompt(8) + alone(prompt(8), 20)


def test_prompt_tokens_are_counted_once_however_often_one_runs(fake: PagedRunner) -> None:
    plan, crowd = crowded()
    run_all(plan, fake)
    assert plan.num_prompt_tokens == 9
    assert plan.num_cached_tokens == sum(one.num_cached_tokens for one in crowd) == 0


def test_admission_leaves_each_growing_sequence_a_block(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=4, max_batch_tokens=32)
    plan.add(sequence(1, prompt(4), max_tokens=12))
    plan.add(sequence(2, prompt(12, start=9), max_tokens=1))
    assert lengths(step(plan, fake)) == {1: 4}


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_finish_frees_in_every_state_and_twice_is_once(fake: PagedRunner, after: int) -> None:
    plan = scheduler(max_batch_tokens=4)
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
    assert plan.commit(batch, output) == [two]
    assert (one.num_output_tokens, one.num_computed) == (0, 0)


def test_a_failed_sequence_stays_where_it_was(fake: PagedRunner) -> None:
    plan = scheduler()
    one, two = sequence(1, prompt(3)), sequence(2, prompt(3, start=5))
    plan.add(one)
    plan.add(two)
    batch = plan.schedule()
    output = fake.launch(batch).result()
    output.errors[0] = "numerical"
    assert plan.commit(batch, output) == [two]
    assert one.num_output_tokens == 0
    plan.finish(one)
    run_all(plan, fake)
    assert two.token_ids[3:] == alone(two.request.prompt_ids, 4)


@pytest.mark.parametrize("token_ids", [[], [5, 6]])
def test_a_runner_that_chooses_no_token_or_several_is_an_error(token_ids: list[int]) -> None:
    plan = scheduler()
    plan.add(sequence(7, prompt(3)))
    batch = plan.schedule()
    with pytest.raises(EngineError, match=f"chose {len(token_ids)} tokens for request 7"):
        plan.commit(batch, StepOutput([token_ids], [[]]))


def test_a_storm_of_cancels_costs_the_same_for_each() -> None:
    """The queue is a dictionary: were it a list, this would take minutes."""
    plan = scheduler(max_waiting=100_000)
    queue = [sequence(i, [1, 2]) for i in range(100_000)]
    for one in queue:
        plan.add(one)
    for one in reversed(queue):
        plan.finish(one)
    assert not plan.waiting


# ---------------------------------------------------------------- steps ahead


def lockstep(request_id: int, prompt_ids: list[int], max_tokens: int) -> Sequence:
    """A sequence whose next choice needs a host that knows all tokens."""
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


def test_only_multi_token_bad_words_need_the_host() -> None:
    request = Request(1, [1], SamplingParams())
    assert not Sequence(request, 4, bad_word_ids=((1,), (2,))).needs_host
    assert Sequence(request, 4, bad_word_ids=((1,), (2, 3))).needs_host


def test_a_sequence_that_needs_the_host_runs_every_other_step_and_delays_nobody() -> None:
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
    plan = scheduler(max_num_seqs=8, max_batch_tokens=2)
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
    assert plan.commit(new, fake.launch(new).result()) == [one]
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


STOP = 2


def owner(one: Sequence) -> Sequence:
    """Who waits in the queue for it: itself, or of a beam the search."""
    return one.head or one


def members(one: Sequence) -> list[Sequence]:
    """The sequences with blocks that it stands for."""
    return [one] if one.beams is None else one.beams


def beam_search(
    request_id: int, prompt_ids: list[int], max_tokens: int, stops: bool = True, **params: object
) -> BeamGroup:
    given = SamplingParams(**params)  # type: ignore[arg-type]
    outputs = tuple(range(request_id, request_id + given.beam_width))
    request = Request(request_id, prompt_ids, given, output_ids=outputs)
    ends = frozenset({STOP}) if stops else frozenset()
    head = Sequence(request, max_tokens, eos_token_ids=ends)
    return BeamGroup(head, OutputStage(None), NUM_NAMED)


def told(group: BeamGroup) -> list[tuple[list[int], float]]:
    return [(one.token_ids, one.cumulative_logprob) for one in group.results()]


def undisturbed(group: BeamGroup) -> list[tuple[list[int], float]]:
    """What a search of the same request finds with the whole engine to itself."""
    head = group.head
    again = Sequence(head.request, head.max_tokens, eos_token_ids=head.eos_token_ids)
    alone = BeamGroup(again, OutputStage(None), NUM_NAMED)
    plan, fake = scheduler(num_blocks=99), PagedRunner(num_blocks=99)
    plan.add(again)
    while not alone.is_finished:
        batch = plan.schedule()
        if plan.commit(batch, fake.launch(batch).result()):
            alone.advance(plan)
    return told(alone)


def search_step(plan: Scheduler, fake: PagedRunner, group: BeamGroup) -> Batch:
    """One turn of the engine's loop with one search, which it ends."""
    batch = plan.schedule()
    if plan.commit(batch, fake.launch(batch).result()):
        group.advance(plan)
    if group.is_finished:
        plan.finish(group.head)
    return batch


def test_beams_compute_their_prompt_once_and_choose_in_one_step(fake: PagedRunner) -> None:
    plan = scheduler()
    group = beam_search(1, [0] * 9, 4, stops=False, beam_width=3)
    plan.add(group.head)
    batches = [search_step(plan, fake, group) for _ in range(4)]
    assert [batch.num_tokens for batch in batches] == [9, 3, 3, 3]
    assert group.is_finished
    assert told(group) == undisturbed(group)
    assert plan.num_free_blocks == 16


def test_beams_share_blocks_until_they_write(fake: PagedRunner) -> None:
    plan = scheduler()
    group = beam_search(1, [0] * 10, 6, stops=False, beam_width=3)
    plan.add(group.head)
    search_step(plan, fake, group)
    assert plan.num_free_blocks == 13
    assert [beam.blocks for beam in members(group.head)] == [members(group.head)[0].blocks] * 3
    batch = search_step(plan, fake, group)
    assert len(batch.copies) == 2, "one of three writes in place"
    assert {source for source, _ in batch.copies} == {batch.chunks[0].sequence.blocks[2]}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_prefill_chunk", [2, 16])
def test_beams_that_lost_their_blocks_compute_what_they_had_in_common_once(
    fake: PagedRunner, prefix_cache: bool, max_prefill_chunk: int
) -> None:
    plan = scheduler(prefix_cache=prefix_cache, max_prefill_chunk=max_prefill_chunk)
    group = beam_search(1, [0, 1] * 8, 7, stops=False, beam_width=3)
    plan.add(group.head)
    lost = 0
    while not group.is_finished:
        before = group.head.num_steps
        if before in (2, 4) and lost < before:
            plan.suspend(group.head)
            assert plan.num_free_blocks == 16
            if not prefix_cache:  # nothing is found where it was by chance
                fake._tokens.clear()
            plan.resume(group.head)
            lost = before
            computed = 0
            while group.head.num_steps == before:
                computed += search_step(plan, fake, group).num_tokens
            # The prompt has full blocks; each beam has its own tokens after that.
            assert 3 * before <= computed <= 16 + 3 * before
            assert not prefix_cache or computed == 3 * before
        else:
            search_step(plan, fake, group)
    assert told(group) == undisturbed(group)
    assert plan.num_free_blocks == 16


def test_a_search_yields_as_one_and_finds_the_same(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=16, max_num_seqs=8, prefix_cache=False)
    olds = [sequence(one, prompt(8, start=one), max_tokens=20) for one in (3, 4)]
    group = beam_search(5, [0, 1] * 3, 12, stops=False, beam_width=3)
    for old in olds:
        plan.add(old)
    plan.add(group.head)
    while not group.is_finished:
        batch = plan.schedule()
        beams = [chunk.sequence for chunk in batch.chunks if chunk.sequence.head is not None]
        assert not any(c.samples for c in batch.chunks if c.sequence in beams) or (
            beams == members(group.head)
        )
        moved = plan.commit(batch, fake.launch(batch).result())
        if any(one.head is not None for one in moved):
            group.advance(plan)
        for old in olds:
            if old.num_output_tokens == 20:
                plan.finish(old)
    assert group.head.num_preemptions > 0
    for old in olds:
        assert old.token_ids[8:] == alone(old.token_ids[:8], old.num_output_tokens)
    assert told(group) == undisturbed(group)


@pytest.mark.parametrize(
    ("changes", "max_tokens", "message"),
    [
        ({"max_num_seqs": 2}, 4, "beam_width: 3 beams run as 3 sequences, and at most 2 run"),
        (
            {"num_blocks": 9},
            13,
            "beam_width: 3 beams, a prompt of 8 tokens and max_tokens of 13 "
            "need 11 blocks of KV cache, and the whole cache has 9; allowed: max_tokens of at "
            "most 9, or fewer beams",
        ),
    ],
)
def test_a_search_that_could_not_run_alone_is_refused(
    changes: dict[str, int], max_tokens: int, message: str
) -> None:
    plan = scheduler(**changes)
    group = beam_search(1, [0] * 8, max_tokens, beam_width=3)
    with pytest.raises(RequestError, match=message):
        plan.add(group.head)
    assert not plan.waiting


def test_the_largest_search_that_fits_ends(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=11, prefix_cache=False)
    group = beam_search(1, [0] * 8, 13, stops=False, beam_width=3)
    plan.add(group.head)
    while not group.is_finished:
        assert search_step(plan, fake, group).chunks
    assert group.head.num_preemptions == 0
    assert told(group) == undisturbed(group)


def guess(token_ids: list[int], count: int) -> list[int]:
    """A drafter that is mostly right, and sometimes has fewer than it was asked for."""
    drafts: list[int] = []
    for _ in range(count):
        luck = zlib.crc32(bytes([*token_ids, *drafts, 7])) % 8
        if luck == 0:
            break
        right = next_token([*token_ids, *drafts], 3)
        drafts.append(right if luck > 2 else (right + 1) % 3)
    return drafts


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def waits(one: Sequence) -> bool:
    """Whether a running sequence cannot go on before a commit."""
    if one.beams is not None:
        return any(beam.num_in_flight for beam in one.beams)
    last_is_in_flight = one.num_output_tokens + one.num_in_flight == one.max_tokens
    return one.num_in_flight > 0 and (one.needs_host or last_is_in_flight)


def rows_of(chunk: Chunk) -> int:
    """Of logits that somebody looks at."""
    return chunk.num_scores + chunk.num_drafts + chunk.samples


def scores_of(one: Sequence) -> list[list[Candidate]]:
    """What the runner thinks of the tokens of a prompt, if that is asked for."""
    prompt_ids = one.request.prompt_ids
    if one.request.params.num_prompt_logprobs is None:
        return []
    scores = [score(prompt_ids[:i], prompt_ids[i]) for i in range(1, len(prompt_ids))]
    return [[], *[[own] for own in scores]]


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals, cancels, suspensions and failures over random small pools.

    Steps are taken in as late as the runner allows.
    """

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 12),
        max_prefill_chunk=st.none() | st.integers(1, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
        max_draft_tokens=st.integers(1, 8),
        steps_ahead=st.sampled_from([0, 1, 1, 2]),
        spare_rows=st.integers(0, 6),
    )
    def start(self, steps_ahead: int, spare_rows: int, **config: int) -> None:
        self.config = config
        self.max_rows = config["max_num_seqs"] + config["max_draft_tokens"] + spare_rows
        self.plan = Scheduler(max_rows=self.max_rows, **config)
        self.pool = self.plan._pool
        self.fake = PagedRunner(config["num_blocks"], config["block_size"], steps_ahead)
        self.fake.draft = guess
        self.in_flight: deque[tuple[Batch, LateStep, set[int]]] = deque()  # with blocks written
        self.num_added = 0
        self.alive: dict[int, Sequence] = {}
        self.searches: dict[int, BeamGroup] = {}

    @rule(
        prompt_ids=PROMPTS,
        max_tokens=st.integers(1, 8),
        beam_width=st.integers(2, 3),
        stops=st.booleans(),
        early_stopping=st.booleans(),
    )
    def add_a_search(
        self, prompt_ids: list[int], max_tokens: int, beam_width: int, stops: bool, **params: bool
    ) -> None:
        self.num_added += 1
        group = beam_search(
            self.num_added, prompt_ids, max_tokens, stops, beam_width=beam_width, **params
        )
        size, num_blocks = self.config["block_size"], self.config["num_blocks"]
        length = len(prompt_ids) + max_tokens
        common = len(prompt_ids) // size
        needed = common + beam_width * (-(-(length - 1) // size) - common)
        seats = min(self.config["max_num_seqs"], self.config["max_batch_tokens"])
        try:
            self.plan.add(group.head)
        except RequestError:
            assert beam_width > seats or needed > num_blocks or length > num_blocks * size
        else:
            assert beam_width <= seats and needed <= num_blocks
            self.alive[self.num_added] = group.head
            self.searches[self.num_added] = group

    @rule(
        prompt_ids=PROMPTS,
        max_tokens=st.integers(1, 10),
        cache_salt=st.sampled_from(["", "", "x"]),
        stops=st.booleans(),
        needs_host=st.sampled_from([False, False, True]),
        num_drafts=st.sampled_from([0, 0, 1, 2, 5]),
        scores=st.booleans(),
    )
    def add(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        cache_salt: str,
        stops: bool = False,
        needs_host: bool = False,
        num_drafts: int = 0,
        scores: bool = False,
    ) -> None:
        self.num_added += 1
        params = SamplingParams(num_prompt_logprobs=0 if scores else None)
        request = Request(self.num_added, prompt_ids, params, cache_salt)
        ends = frozenset({STOP}) if stops else frozenset()
        one = Sequence(request, max_tokens, eos_token_ids=ends)
        one.needs_host = needs_host
        one.num_drafts = num_drafts
        limit = self.config["num_blocks"] * self.config["block_size"]
        try:
            self.plan.add(one)
        except RequestError:
            assert len(prompt_ids) + max_tokens > limit
        else:
            self.alive[one.request_id] = one

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def add_a_follow_up(self, data: st.DataObject) -> None:
        """A prompt that repeats tokens which another request has by now."""
        other = members(data.draw(st.sampled_from(list(self.alive.values()))))[-1]
        length = data.draw(st.integers(1, len(other.token_ids)))
        self.add(
            other.token_ids[:length],
            data.draw(st.integers(1, 6)),
            other.request.cache_salt,
            scores=data.draw(st.booleans()),
        )

    @rule()
    def step(self) -> None:
        self._step()

    @rule()
    def steps(self) -> None:
        for _ in range(4):
            self._step()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), what=st.sampled_from(["finish", "suspend", "back and forth", "fail"]))
    def step_with_an_incident(self, data: st.DataObject, what: str) -> None:
        """Something happens between the run of a batch and its commit."""
        self._step(data.draw(st.sampled_from(list(self.alive.values()))), what)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.alive.values())))
        self.plan.finish(one)
        del self.alive[one.request_id]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.plan.suspend(data.draw(st.sampled_from(list(self.alive.values()))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), num_drafts=st.integers(0, 5))
    def draft(self, data: st.DataObject, num_drafts: int) -> None:
        data.draw(st.sampled_from(list(self.alive.values()))).num_drafts = num_drafts

    @rule()
    def resume_all(self) -> None:
        for one in list(self.plan.suspended):
            self.plan.resume(one)

    def _step(self, victim: Sequence | None = None, what: str = "") -> None:
        before = list(self.plan.running)
        first_waits = bool(before) and waits(before[0])
        batch = self.plan.schedule()
        self._check(batch, before, first_waits)
        if batch.chunks:
            pending = self.fake.launch(batch)
            self.in_flight.append((batch, pending, self.fake.written))
        if victim is not None:
            if what in ("suspend", "back and forth"):
                self.plan.suspend(victim)
            if what == "back and forth":
                self.plan.resume(victim)
            if what == "finish":
                self.plan.finish(victim)
                del self.alive[victim.request_id]
        if len(self.in_flight) > (self.fake.steps_ahead if batch.chunks else 0):
            self._take(victim if what == "fail" else None)

    def _take(self, failing: Sequence | None) -> None:
        batch, pending, _ = self.in_flight.popleft()
        output = pending.result()
        for index, chunk in enumerate(batch.chunks):
            if owner(chunk.sequence) is failing:
                output.errors[index] = "numerical"
        ours = [chunk.sequence for chunk in batch.chunks if not chunk.is_stale]
        moved = self.plan.commit(batch, output)
        for index in output.errors:
            failed = batch.chunks[index].sequence
            assert failed not in moved
            if failed in ours and self.alive.pop(owner(failed).request_id, None) is not None:
                self.plan.finish(owner(failed))
        for head in dict.fromkeys(one.head for one in moved if one.head is not None):
            assert [one for one in moved if one.head is head] == head.beams, "not in step"
            group = self.searches[head.request_id]
            group.advance(self.plan)
            if group.is_finished:
                assert told(group) == undisturbed(group)
                self.plan.finish(head)
                del self.alive[head.request_id]
        for one in moved:
            assert one in ours
            if one.head is not None:
                continue
            prompt_ids = one.request.prompt_ids
            assert one.token_ids[len(prompt_ids) :] == alone(prompt_ids, one.num_output_tokens)
            assert one.num_output_tokens <= one.max_tokens
            assert one.num_accepted <= one.num_drafted
            assert one.num_output_tokens == one.num_steps + one.num_accepted
            assert one.prompt_candidates == scores_of(one), "a score twice, or lost"
            last = one.token_ids[-len(one.last_logprobs) :]
            ended = not one.eos_token_ids.isdisjoint(last)
            if one.num_output_tokens == one.max_tokens or ended:
                self.plan.finish(one)
                del self.alive[one.request_id]

    def _blocks_of(self, chunk: Chunk) -> list[int]:
        """The blocks that a chunk may write to."""
        size = self.config["block_size"]
        first = min(chunk.start, len(chunk.sequence.token_ids) - 1)
        return chunk.sequence.blocks[first // size : (chunk.end - 1) // size + 1]

    def _in_flight_of(self, one: Sequence) -> list[Chunk]:
        return [
            chunk
            for batch, _, _ in self.in_flight
            for chunk in batch.chunks
            if chunk.sequence is one and not chunk.is_stale
        ]

    def _check(self, batch: Batch, before: list[Sequence], first_waits: bool) -> None:
        running = list(self.plan.running)
        if running or self.plan.waiting:
            admitted = running != before
            assert batch.chunks or self.in_flight or admitted, "work, but no progress"
        assert batch.num_tokens <= self.config["max_batch_tokens"]
        num_drafts = sum(chunk.num_drafts for chunk in batch.chunks)
        assert num_drafts <= self.config["max_draft_tokens"]
        num_rows = sum(max(1, rows_of(chunk)) for chunk in batch.chunks)
        assert num_rows <= self.max_rows
        seats = sum(len(members(one)) for one in running)
        assert seats <= self.plan._num_seats <= self.config["max_num_seqs"]
        stayed = [one for one in running if one in before]
        assert stayed == before[: len(stayed)], "an older one lost its blocks to a younger one"
        assert running[: len(stayed)] == stayed, "a preempted one came back in the same step"
        scheduled = [chunk.sequence for chunk in batch.chunks]
        assert len(scheduled) == len(set(scheduled))
        if before:
            first_advances = before[0] in map(owner, scheduled)
            assert first_advances != first_waits, "the first does not advance"
        for chunk in batch.chunks:
            one = chunk.sequence
            assert owner(one).status is Status.RUNNING
            assert chunk.end == one.num_computed
            assert chunk.num_drafts <= one.num_drafts
            length = chunk.length - chunk.num_drafts
            assert 1 <= length <= (self.config["max_prefill_chunk"] or length)
            # Exactly what its steps that are not committed may choose at most, this one included.
            steps = [chunk, *self._in_flight_of(one)]
            assert one.num_in_flight == sum(1 + each.num_drafts for each in steps if each.samples)
            assert len(steps) <= self.fake.steps_ahead + 1
            if one.needs_host and chunk.samples and chunk.start >= one.num_prompt_tokens:
                assert not any(each.samples for each in steps[1:])
            assert one.num_tokens <= one.max_length
            assert len(chunk.scored_ids) == chunk.num_scores
            assert not (chunk.num_scores and chunk.num_drafts)
            assert rows_of(chunk) <= chunk.length
            for block in self._blocks_of(chunk):
                # A beam may compute for all of its search what they have lost together.
                owners = [each for each in members(owner(one)) if block in each.blocks]
                if one.head is not None and not chunk.samples:
                    assert self.pool._hashes[block] is None, "a write that others see"
                    assert self.pool.ref_count(block) == len(owners)
                else:
                    assert not self.pool.is_shared(block), "a write that others see"
                    assert self.pool.ref_count(block) == 1
        targets = [target for _, target in batch.copies]
        assert len(targets) == len(set(targets))
        assert not set(targets) & {source for source, _ in batch.copies}

    @invariant()
    def every_block_has_the_owners_that_it_counts(self) -> None:
        if not hasattr(self, "plan"):
            return
        owners = [0] * self.config["num_blocks"]
        for one in self.plan.running:
            for each in members(one):
                for block in each.blocks:
                    owners[block] += 1
        assert owners == [self.pool.ref_count(block) for block in range(len(owners))]
        assert self.plan._num_growing == sum(map(self.plan._growth, self.plan.running))
        assert self.plan._num_seats == sum(one.num_seats for one in self.plan.running)
        for one in [*self.plan.waiting, *self.plan.suspended]:
            for each in members(one):
                assert each.blocks == [] and each.num_computed == 0
        places = [*self.plan.running, *self.plan.waiting, *self.plan.suspended]
        assert {one.request_id: one for one in places} == self.alive
        assert len(places) == len(self.alive)

    @invariant()
    def no_step_in_flight_writes_what_others_may_find(self) -> None:
        for _, _, written in getattr(self, "in_flight", ()):
            assert not written & set(self.pool._by_hash.values())

    def teardown(self) -> None:
        if not hasattr(self, "plan"):
            return
        self.resume_all()
        bound = 1 + sum(
            one.num_seats * (one.num_prompt_tokens + 2 * one.max_tokens)
            for one in self.alive.values()
        ) * (1 + len(self.alive)) * (1 + self.fake.steps_ahead)
        for _ in range(bound):
            if not self.alive:
                break
            self._step()
        assert not self.alive, "some request never ends"
        while self.in_flight:
            self._step()
        assert self.plan.num_free_blocks == self.config["num_blocks"]


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomTraffic = EngineMachine.TestCase


class SearchMachine(EngineMachine):
    """The same with room for several beam searches, but hardly for their ends."""

    @initialize(
        num_blocks=st.integers(8, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(4, 8),
        max_batch_tokens=st.integers(8, 16),
        max_prefill_chunk=st.none() | st.integers(1, 6),
        prefix_cache=st.booleans(),
        max_draft_tokens=st.integers(1, 8),
        steps_ahead=st.sampled_from([0, 1, 1, 2]),
        spare_rows=st.integers(0, 6),
        prompts=st.lists(PROMPTS, min_size=2, max_size=4),
    )
    def start(
        self, steps_ahead: int, spare_rows: int, prompts: list[list[int]], **config: int
    ) -> None:
        super().start(steps_ahead, spare_rows, **config)
        for index, prompt_ids in enumerate(prompts):
            self.add_a_search(prompt_ids, 8, 2 + index % 2, index % 2 == 0, early_stopping=False)


SearchMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomSearches = SearchMachine.TestCase
