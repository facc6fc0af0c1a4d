"""Drafts are scheduled only if they increase throughput."""

from __future__ import annotations

import itertools

import pytest

from inflight.core.batch import Batch, Chunk, StepOutput
from inflight.core.request import AUTO_DRAFTS, Request
from inflight.core.sequence import Sequence
from inflight.sampling.params import SamplingParams
from inflight.scheduling.acceptance import Rates
from inflight.scheduling.draft_budget import DraftBudget, StepCosts, StepTimes

# A step that reads its weights whatever it computes, and one that computes.
FLAT = StepCosts(StepTimes((1, 64), (1.0, 1.0)))
STEEP = StepCosts(StepTimes((1, 64), (1.0, 64.0)))


def rising(to: float, draft_seconds: float = 0.0) -> StepCosts:
    """Steps of 64 tokens take so many times as long as those of one."""
    return StepCosts(StepTimes((1, 64), (1.0, to)), draft_seconds)


def same(*rates: float) -> list[Rates]:
    """Of sequences whose drafts are all accepted equally often."""
    return [Rates(rate, rate) for rate in rates]


def sequence(request_id: int, wanted: int | None = None) -> Sequence:
    return Sequence(Request(request_id, [1], SamplingParams(), speculation=wanted), 100)


def play(speculation: DraftBudget, one: Sequence, is_right: bool, steps: int) -> None:
    """Steps in which a sequence's drafts are all right, or all wrong."""
    for _ in range(steps):
        speculation.plan([one])
        chunk = Chunk(one, 0, 1 + one.num_drafts, True, one.generation, one.num_drafts)
        chosen = 1 + one.num_drafts if is_right else 1
        output = StepOutput([[0] * chosen], [[0.0] * chosen])
        if one.num_drafts:
            output.num_drafted[0] = one.num_drafts
        speculation.observe(Batch([chunk]), output)


def test_drafts_are_free_where_a_step_costs_the_same() -> None:
    assert DraftBudget(FLAT, 5, AUTO_DRAFTS).best_counts(same(0.5, 0.9), 2) == [5, 5]


def test_no_drafts_if_a_token_costs_as_much_as_a_step() -> None:
    assert DraftBudget(STEEP, 5, AUTO_DRAFTS).best_counts(same(0.9, 0.5), 2) == [0, 0]


def test_a_higher_acceptance_rate_gets_more_drafts() -> None:
    costs = StepCosts(StepTimes((1, 4, 8, 64), (1.0, 1.0, 1.4, 8.0)))
    few, many = DraftBudget(costs, 5, AUTO_DRAFTS).best_counts(same(0.3, 0.95), 2)
    assert few < many


@pytest.mark.parametrize("rates", [[0.9], [0.2, 0.8], [0.5, 0.7, 0.99], [0.05, 0.1]])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1])
def test_no_other_choice_is_faster(rates: list[float], slope: float, draft_seconds: float) -> None:
    def speed(counts: tuple[int, ...] | list[int]) -> float:
        tokens = len(rates) + sum(
            sum(rate ** (j + 1) for j in range(count))
            for rate, count in zip(rates, counts, strict=True)
        )
        seconds = 1.0 + slope * (len(rates) + sum(counts) - 1)
        return tokens / (seconds + max(counts) * draft_seconds)

    costs = rising(1.0 + 63 * slope, draft_seconds)
    chosen = DraftBudget(costs, 4, AUTO_DRAFTS).best_counts(same(*rates), len(rates))
    best = max(map(speed, itertools.product(range(5), repeat=len(rates))))
    # Drafts are taken one by one, and a gain below 2 % is not taken.
    assert speed(chosen) >= best / 1.05


def test_costs_beyond_the_measured_range_are_extrapolated_linearly() -> None:
    costs = StepCosts(StepTimes((1, 2), (1.0, 1.0)))
    assert DraftBudget(costs, 5, AUTO_DRAFTS).best_counts(same(*[0.99] * 4), 4) == [0] * 4


def test_a_sequence_whose_drafts_are_wrong_stops_drafting_and_tries_again() -> None:
    costs = rising(20.0)
    speculation = DraftBudget(costs, 5, AUTO_DRAFTS)
    one = sequence(1)
    speculation.add(one)
    play(speculation, one, is_right=False, steps=30)
    assert one.num_drafts == 0
    counts = []
    for _ in range(400):
        play(speculation, one, is_right=True, steps=1)
        counts.append(one.num_drafts)
    assert max(counts) > 0, "tried again"
    assert counts[-1] == 5, "and found to be right"


def play_ahead(
    speculation: DraftBudget, running: list[Sequence], had: dict[int, list[int]], steps: int
) -> list[list[int]]:
    """Steps of a runner one step ahead, whose text drafter has `had[id][step]` drafts, all right.

    Returns:
        The drafts of each sequence, by step.
    """
    planned: list[list[int]] = []
    for step in range(steps + 1):
        if step < steps:
            speculation.plan(running)
            planned.append([one.num_drafts for one in running])
        if not step:
            continue
        counts = planned[step - 1]  # its result arrives when the next step has been launched
        chunks = [
            Chunk(one, 0, 1 + count, True, one.generation, count)
            for one, count in zip(running, counts, strict=True)
        ]
        proposed = [had[one.request_id][step - 1] for one in running]
        right = [min(pair) for pair in zip(counts, proposed, strict=True)]
        output = StepOutput([[0] * (1 + n) for n in right], [[0.0] * (1 + n) for n in right])
        output.num_drafted.update({i: n for i, n in enumerate(right) if n})
        output.num_proposed.update(enumerate(proposed))
        speculation.observe(Batch(chunks), output)
    return planned


def budget_of(costs: StepCosts, *running: Sequence, max_drafts: int = 8) -> DraftBudget:
    speculation = DraftBudget(costs, max_drafts, AUTO_DRAFTS)
    for one in running:
        speculation.add(one)
    return speculation


@pytest.mark.parametrize(("num_proposed", "most"), [(0, 8), (1, 3), (3, 7), (8, 8)])
def test_a_report_of_fewer_drafts_limits_those_of_later_steps(num_proposed: int, most: int) -> None:
    """After one of none, the next match may be of any length."""
    one = sequence(1)
    planned = play_ahead(budget_of(FLAT, one), [one], {1: [num_proposed] * 6}, 6)
    assert planned[:2] == [[8], [8]], "unknown so far"
    assert planned[2:] == [[most]] * 4


def test_steps_of_one_sequence_may_cost_less_without_the_drafts_scheduled() -> None:
    """As many are scheduled as pay off where there are any."""
    one, trimmed = StepTimes((1, 2, 9), (1.0, 1.6, 1.6)), StepTimes((1, 9), (1.0, 1.02))
    costs = StepCosts(one, 0.0, one, trimmed_one=trimmed)
    assert DraftBudget(costs, 8, AUTO_DRAFTS).best_counts([Rates(0.1, 0.7, 0.1)], 1) == [8]
    assert DraftBudget(costs, 8, AUTO_DRAFTS).best_counts([Rates(0.1, 0.7, 1.0)], 1) == [0]
    costs = StepCosts(one, 0.0, one)
    assert DraftBudget(costs, 8, AUTO_DRAFTS).best_counts([Rates(0.1, 0.7, 0.1)], 1) == [0]


def test_how_often_there_are_drafts_is_learned_from_reports() -> None:
    """In one step of four there are eight drafts, all right."""
    one, trimmed = StepTimes((1, 2, 9), (1.0, 1.6, 1.6)), StepTimes((1, 9), (1.0, 1.02))
    had = [8 if step % 4 == 0 else 0 for step in range(200)]
    counts = {}
    for label, costs in (
        ("dear", StepCosts(StepTimes((1, 2, 9), (1.0, 6.0, 6.0)))),
        ("trimmed", StepCosts(one, 0.0, one, trimmed_one=trimmed)),
    ):
        sequence_ = sequence(1)
        planned = play_ahead(budget_of(costs, sequence_), [sequence_], {1: had}, 200)
        counts[label] = sum(drafts == [8] for drafts in planned[100:])
    assert counts["dear"] < 20
    assert counts["trimmed"] > 80


def test_a_first_draft_that_is_seldom_right_may_lead_to_many() -> None:
    """A text that begins to repeat itself goes on: its first drafts pay for those in vain."""
    costs = rising(3.0)
    budget = DraftBudget(costs, 8, AUTO_DRAFTS)
    assert budget.best_counts(same(0.03), 1) == [0]
    assert budget.best_counts([Rates(0.05, 1.0)], 1) == [8]


def test_the_rate_of_later_drafts_is_that_after_accepted_ones() -> None:
    """Each second step has no right draft, the others four of eight."""
    one = sequence(1)
    costs = StepCosts(StepTimes((1, 2, 5, 9), (1.0, 1.2, 1.2, 1.5)))
    speculation = budget_of(costs, one)
    counts = []
    for step in range(60):
        speculation.plan([one])
        count = one.num_drafts
        right = min(count, 4) if step % 2 else 0
        output = StepOutput([[0] * (1 + right)], [[0.0] * (1 + right)])
        output.num_drafted.update({0: count} if count else {})
        speculation.observe(Batch([Chunk(one, 0, 1 + count, True, 0, count)]), output)
        counts.append(count)
    assert min(counts) >= 4, "half of the steps have four, which a rate of 1 in 2 would not promise"


def test_steps_without_drafts_have_times_of_their_own() -> None:
    """Where a step with one draft takes as long as one with eight, but longer than one without."""
    times = StepTimes((1, 9), (1.5, 1.5))
    costs = StepCosts(times, plain=StepTimes((1, 4), (1.0, 1.0)))
    budget = DraftBudget(costs, 8, AUTO_DRAFTS)
    assert budget.best_counts(same(0.3), 1) == [0]
    assert budget.best_counts(same(0.6), 1) == [8]
    assert budget.best_counts([*same(0.3), *[Rates(0.0, 0.0)] * 4], 5) != [0] * 5, "not timed"


def test_drafts_of_one_sequence_have_times_of_their_own() -> None:
    costs = StepCosts(
        StepTimes((1, 2, 9), (1.0, 2.0, 9.0)), verifying_one=StepTimes((1, 9), (1.0, 1.0))
    )
    budget = DraftBudget(costs, 8, AUTO_DRAFTS)
    assert budget.best_counts(same(0.4), 1) == [8]
    assert budget.best_counts(same(0.4, 0.0), 2) == [0, 0]


def test_a_text_that_repeats_again_has_its_drafts_back_at_once() -> None:
    """Steps without a match say nothing about those with one."""
    one = sequence(1)
    costs = rising(7.0)
    had = [8] * 10 + [0] * 60 + [2, 4, 8, 8, 8]
    planned = play_ahead(budget_of(costs, one), [one], {1: had}, len(had))
    assert planned[8:12] == [[8]] * 4
    assert sum(count for (count,) in planned[22:72]) < 25
    assert planned[72] > [2]
    assert planned[73:] == [[8], [8]]


def test_drafts_that_would_have_been_accepted_are_scheduled_again() -> None:
    """A sequence whose drafts were wrong for long has right ones, of which none is scheduled."""
    one = sequence(1)
    speculation = budget_of(rising(7.0), one)
    planned = []
    for step in range(60):
        speculation.plan([one])
        count, is_right = one.num_drafts, step >= 40
        output = StepOutput([[0] * (1 + count * is_right)], [[0.0] * (1 + count * is_right)])
        output.num_proposed[0] = 8
        output.num_drafted.update({0: count} if count else {})
        if is_right:
            output.would_accept.add(0)
        speculation.observe(Batch([Chunk(one, 0, 1 + count, True, 0, count)]), output)
        planned.append(count)
    assert planned[35:41] == [0] * 6
    assert planned[46:] == [8] * 14


def test_rows_go_to_the_texts_that_repeat() -> None:
    running = [sequence(i) for i in range(24)]
    had = {i: [8 if i % 12 == 0 else 0] * 60 for i in range(24)}
    # Of 24 sequences a row costs a third of what it yields if it is right each time.
    costs = StepCosts(StepTimes((1, 24, 240), (1.0, 1.0, 4.0)))
    last = play_ahead(budget_of(costs, *running), running, had, 60)[-1]
    assert last == [8 if i % 12 == 0 else 0 for i in range(24)]


def test_a_new_sequence_starts_with_the_shared_estimate() -> None:
    costs = rising(20.0)
    speculation = DraftBudget(costs, 5, AUTO_DRAFTS)
    for request_id in range(40):
        one = sequence(request_id)
        speculation.add(one)
        play(speculation, one, is_right=False, steps=6)
        speculation.forget(one)
    late = sequence(99)
    speculation.add(late)
    speculation.plan([late])
    assert late.num_drafts == 0


@pytest.mark.parametrize(
    ("wanted", "default", "expected"), [(3, AUTO_DRAFTS, 3), (9, 0, 5), (None, 2, 2), (0, 4, 0)]
)
def test_a_request_gets_the_number_that_it_asks_for(
    wanted: int | None, default: int, expected: int
) -> None:
    speculation = DraftBudget(STEEP, 5, default)
    one = sequence(1, wanted)
    speculation.add(one)
    speculation.plan([one])
    assert one.num_drafts == expected


def test_a_sequence_needing_committed_tokens_has_no_device_drafts() -> None:
    one = sequence(1, 3)
    one.needs_committed_tokens = True
    DraftBudget(FLAT, 5, AUTO_DRAFTS, host_drafts=False).add(one)
    assert one.num_drafts == 0
    DraftBudget(FLAT, 5, AUTO_DRAFTS, host_drafts=True).add(one)
    assert one.num_drafts == 3


def test_shared_estimates_expire() -> None:
    costs = rising(20.0)
    speculation = DraftBudget(costs, 5, AUTO_DRAFTS)
    for request_id in range(100):
        one = sequence(request_id)
        speculation.add(one)
        play(speculation, one, is_right=False, steps=30)
        speculation.forget(one)
    late = sequence(999)
    speculation.add(late)
    play(speculation, late, is_right=True, steps=3000)
    assert late.num_drafts == 5
