"""Tokens are shared between classes and tenants while they wait, whatever their load."""

from __future__ import annotations

from collections import Counter

import pytest

from fake_runner import PagedRunner
from inflight.core.request import PriorityClass
from inflight.core.sequence import Sequence
from inflight.errors import CapacityError
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.waiting_queue import QueueKey, WaitingQueue
from scheduling import beam_search, lengths, prompt, run_all, scheduler, search_step, sequence, step

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE


@pytest.fixture
def fake() -> PagedRunner:
    return PagedRunner(block_size=4)


def backlogged(plan: Scheduler, counts: dict[str, int], max_tokens: dict[str, int]) -> None:
    """Queue so many requests of each tenant, of 5 tokens each that no other prompt has."""
    for tenant, count in counts.items():
        for number in range(count):
            ids = [ord(tenant[0]), *divmod(number, 256), 1, 1]
            request_id = number + 100_000 * (1 + sorted(counts).index(tenant))
            plan.add(sequence(request_id, ids, max_tokens[tenant], tenant=tenant))


def charges_of(plan: Scheduler) -> Counter[str]:
    """Tokens charged from now on, by tenant."""
    charged: Counter[str] = Counter()
    charge = plan.waiting.charge

    def count(key: QueueKey, num_tokens: int) -> None:
        charged[key[1]] += num_tokens
        charge(key, num_tokens)

    plan.waiting.charge = count  # type: ignore[method-assign]
    return charged


def served(
    plan: Scheduler, fake: PagedRunner, num_steps: int
) -> tuple[Counter[str], Counter[PriorityClass]]:
    """Tokens of prompts and output in so many steps, by tenant and by class."""
    tenants: Counter[str] = Counter()
    classes: Counter[PriorityClass] = Counter()
    for _ in range(num_steps):
        for chunk in step(plan, fake).chunks:
            one = chunk.sequence
            num_tokens = chunk.samples + chunk.length * (chunk.start < one.num_prompt_tokens)
            tenants[one.request.tenant] += num_tokens
            classes[one.request.priority_class] += num_tokens
    return tenants, classes


@pytest.mark.parametrize("max_tokens", [{"a": 4, "b": 4}, {"a": 2, "b": 9}])
def test_a_tenant_with_ten_times_the_load_gets_half_of_the_tokens(
    fake: PagedRunner, max_tokens: dict[str, int]
) -> None:
    plan = scheduler(WaitingQueue(max_waiting=10_000))
    backlogged(plan, {"a": 2000, "b": 200}, max_tokens)
    tokens, _ = served(plan, fake, 200)
    assert {one.request.tenant for one in plan.waiting} == {"a", "b"}
    assert tokens["a"] / tokens["b"] == pytest.approx(1.0, abs=0.03)


def test_output_counts_before_its_request_has_ended(fake: PagedRunner) -> None:
    plan = scheduler(max_num_seqs=2)
    charged = charges_of(plan)
    plan.add(sequence(1, prompt(3), 40, tenant="a"))
    plan.add(sequence(2, prompt(9, start=5), 12, tenant="b"))
    for request_id in (3, 4, 5, 6):
        tenant = "a" if request_id % 2 else "b"
        plan.add(sequence(request_id, prompt(3, start=20 * request_id), 2, tenant=tenant))
    order: list[int] = []
    while len(plan.waiting) > 1:
        order += [one for one in lengths(step(plan, fake)) if one not in order]
    # When b's first has ended, it has used 21 tokens and a 16: a is next, but only once.
    assert order == [1, 2, 3, 4, 5]
    assert 3 + 12 <= charged["a"] < 3 + 40


@pytest.mark.parametrize("num_waiting", [0, 9])
def test_a_tenant_that_was_idle_gets_half_from_then_on_and_no_more(
    fake: PagedRunner, num_waiting: int
) -> None:
    """What the other one used alone is not a debt, also if it has not been charged yet."""
    plan = scheduler(max_num_seqs=2)
    for request_id in range(1, 3 + num_waiting):
        plan.add(sequence(request_id, prompt(2, start=9 * request_id), 25, tenant="a"))
    for _ in range(20):
        step(plan, fake)
    backlogged(plan, {"a": 90, "b": 90}, {"a": 3, "b": 3})
    while any(one.max_tokens == 25 for one in (*plan.running, *plan.waiting)):
        step(plan, fake)
    assert num_waiting > 0 or len(plan.waiting) > 170
    tokens, _ = served(plan, fake, 60)
    assert tokens["a"] == pytest.approx(tokens["b"], abs=2 * 8)


def test_a_cached_prompt_costs_what_is_computed(fake: PagedRunner) -> None:
    plan = scheduler(max_num_seqs=1)
    plan.add(sequence(1, prompt(13), 1, tenant="a"))
    run_all(plan, fake)
    for request_id in range(2, 6):
        plan.add(sequence(request_id, prompt(13), 1, tenant="a"))
    for request_id in range(6, 8):
        plan.add(sequence(request_id, prompt(7, start=request_id), 1, tenant="b"))
    order = []
    while plan.waiting:
        order += lengths(step(plan, fake))
    # Of 13 tokens, one is computed: with its output it costs 2 tokens, and one of b 8.
    assert order == [2, 6, 3, 4, 5, 7]


def test_a_beam_search_costs_the_tokens_of_all_beams(fake: PagedRunner) -> None:
    plan = scheduler()
    charged = charges_of(plan)
    group = beam_search(1, [1, 0], max_tokens=5, stops=False, beam_width=3)
    plan.add(group)
    while not group.is_finished:
        search_step(plan, fake, group)
    assert charged == {"": 2 + 3 * 5}


def test_classes_share_the_tokens_by_weight(fake: PagedRunner) -> None:
    plan = scheduler(WaitingQueue({INTERACTIVE: 4, BATCH: 1}, max_waiting=10_000))
    for number in range(1500):
        for offset, priority in ((0, BATCH), (5000, INTERACTIVE)):
            ids = [*divmod(number, 256), offset // 5000, 1]
            plan.add(sequence(number + offset + 1, ids, 4, priority_class=priority))
    _, tokens = served(plan, fake, 500)
    assert tokens[INTERACTIVE] / tokens[BATCH] == pytest.approx(4.0, abs=0.15)


def preempted(plan: Scheduler, fake: PagedRunner) -> Sequence:
    """Two sequences that together outgrow the pool; returns the one that lost its blocks."""
    old = sequence(1, prompt(8), 24, tenant="a")
    young = sequence(2, prompt(8, start=3), 24, tenant="b")
    plan.add(old)
    plan.add(young)
    step(plan, fake)
    while not plan.waiting:
        step(plan, fake)
    assert list(plan.waiting) == [young]
    return young


def test_a_preempted_group_is_the_first_of_its_tenant_and_not_charged_again() -> None:
    fake = PagedRunner(num_blocks=9)
    plan = scheduler(num_blocks=9)
    charged = charges_of(plan)
    young = preempted(plan, fake)
    before = charged["b"]
    assert before == 8 + young.num_output_tokens
    later = sequence(3, prompt(4, start=9), 4, tenant="b")
    plan.add(later)
    assert list(plan.waiting) == [young, later]
    while young in plan.waiting:
        assert later in plan.waiting
        step(plan, fake)
    assert charged["b"] <= before + 4, "the prompt of the later one"
    run_all(plan, fake)
    assert charged == {"a": 8 + 24, "b": 8 + 24 + 4 + 4}
    assert young.num_preemptions


def test_a_large_request_is_not_overtaken_until_it_fits(fake: PagedRunner) -> None:
    plan = scheduler(num_blocks=16, max_num_seqs=8)
    plan.add(sequence(1, prompt(30), 12, tenant="a"))
    step(plan, fake)
    large = sequence(2, prompt(40, start=3), 4, tenant="b")
    plan.add(large)
    step(plan, fake)
    assert plan.lacks_blocks
    for request_id in range(3, 40):
        # New tenants come all the time, each with a request that would fit.
        plan.add(sequence(request_id, prompt(2, start=request_id), 2, tenant=str(request_id)))
        step(plan, fake)
        if large not in plan.waiting:
            break
    assert large not in plan.waiting
    assert len(plan.waiting) == request_id - 2 or plan.lacks_blocks is False


def test_waiting_prompt_tokens_are_limited() -> None:
    plan = scheduler(WaitingQueue(max_waiting_tokens=20))
    plan.add(sequence(1, prompt(30)))  # alone, whatever it has: it would not fit later either
    with pytest.raises(
        CapacityError,
        match=r"^30 prompt tokens are waiting \(max_waiting_tokens is 20\) and this prompt has 1; "
        r"retry in 7 s$",
    ):
        plan.add(sequence(2, prompt(1)), retry_after_s=7)
    plan.finish(next(iter(plan.waiting)))
    plan.add(sequence(3, prompt(19), max_tokens=40))
    plan.add(sequence(4, prompt(1)))
    with pytest.raises(CapacityError):
        plan.add(sequence(5, prompt(1)))
    assert plan.waiting.num_refused == {"max_waiting": 0, "max_waiting_tokens": 2}
