"""The engine works one step ahead of its runner's results."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting_engine import Clock, make_engine, request, run
from fake_runner import LateStep, PagedRunner, alone
from inflight.core.batch import Batch, StepOutput
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.engine import generate


def test_the_next_step_is_launched_before_the_last_result_is_taken():
    runner = PagedRunner(steps_ahead=1)
    engine = make_engine(runner)
    engine.submit(request(1, [1], max_tokens=3, ignore_eos=True))
    assert engine.step() == []
    while engine.has_work:
        engine.step()
    assert runner.log == ["launch 0", "launch 1", "result 0", "launch 2", "result 1", "result 2"]


def test_tokens_are_those_of_a_runner_that_does_not_work_ahead():
    runner = PagedRunner(steps_ahead=1)
    outputs = generate(
        make_engine(runner),
        [
            request(1, [1, 2], max_tokens=20, ignore_eos=True),
            request(2, [1, 1, 1], max_tokens=7, ignore_eos=True),
        ],
    )
    assert outputs == {1: alone([1, 2], 20), 2: alone([1, 1, 1], 7)}
    assert runner.num_launched == 20, "no step beyond the last token"


def test_tokens_computed_after_eos_are_dropped():
    expected = alone([1], 50)
    end = expected.index(0) + 1
    runner = PagedRunner(steps_ahead=1)
    engine = make_engine(runner)
    engine.submit(request(1, [1], max_tokens=50, end_id=0))
    events = run(engine)[1]
    assert [i for e in events for i in e.token_ids] == expected[:end]
    assert [e.is_last for e in events] == [False] * (end - 1) + [True]
    assert runner.num_launched == runner.num_taken == end + 1
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_there_is_work_while_a_step_is_in_flight():
    engine = make_engine(PagedRunner(steps_ahead=1))
    engine.submit(request(1, [1], max_tokens=9))
    engine.step()
    engine.step()
    (event,) = engine.cancel(1)
    assert (event.finish_reason, event.position) == (FinishReason.CANCELLED, 1)
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_cancelled_request_leaves_the_batch_at_once():
    engine = make_engine(PagedRunner(steps_ahead=1))
    for request_id in (1, 2):
        engine.submit(request(request_id, [request_id], max_tokens=9, ignore_eos=True))
    engine.step()
    engine.cancel(1)
    outputs = run(engine)
    assert list(outputs) == [2]
    assert [i for e in outputs[2] for i in e.token_ids] == alone([2], 9)


def test_a_request_that_takes_the_id_of_a_cancelled_one_gets_its_own_tokens():
    engine = make_engine(PagedRunner(steps_ahead=1))
    engine.submit(request(1, [1, 2, 0], max_tokens=9, ignore_eos=True))
    engine.step()
    engine.cancel(1)
    engine.submit(request(1, [2], max_tokens=4, ignore_eos=True))
    assert [i for e in run(engine)[1] for i in e.token_ids] == alone([2], 4)


def test_a_failed_result_ends_its_requests_in_the_next_step_too(caplog):
    runner = PagedRunner(steps_ahead=1)
    engine = make_engine(runner)
    engine.submit(request(1, [1], max_tokens=9, ignore_eos=True))
    engine.step()
    engine.submit(request(2, [2], max_tokens=3, ignore_eos=True))
    runner.failing_results = {0}
    with caplog.at_level(logging.CRITICAL):
        (event,) = engine.step()
    assert (event.request_id, event.error_kind) == (1, "engine")
    outputs = run(engine)
    assert list(outputs) == [2]
    assert [i for e in outputs[2] for i in e.token_ids] == alone([2], 3)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_failed_launch_ends_its_requests_in_the_step_before_too(caplog):
    runner = PagedRunner(steps_ahead=1)
    engine = make_engine(runner)
    engine.submit(request(1, [1], max_tokens=9, ignore_eos=True))
    engine.step()
    runner.failing_launches = {1}
    with caplog.at_level(logging.CRITICAL):
        (event,) = engine.step()
    assert (event.request_id, event.error_kind) == (1, "engine")
    assert run(engine) == {}
    assert generate(engine, [request(2, [2], max_tokens=3, ignore_eos=True)]) == {2: alone([2], 3)}


def test_an_error_of_an_ended_request_is_not_reported_again():
    runner = PagedRunner(steps_ahead=1)
    runner.poisoned = {1}
    engine = make_engine(runner)
    for request_id in (1, 2):
        engine.submit(request(request_id, [request_id], max_tokens=4, ignore_eos=True))
    outputs = run(engine)
    assert [e.error_kind for e in outputs[1]] == ["engine"]
    assert [i for e in outputs[2] for i in e.token_ids] == alone([2], 4)


class TickingRunner(PagedRunner):
    """Each step is done a second of the clock after its launch, or after the step before it."""

    def __init__(self, clock: Clock, steps_ahead: int) -> None:
        super().__init__(steps_ahead=steps_ahead)
        self.clock = clock
        self.busy_until = 0.0

    def launch(self, batch: Batch) -> TickingStep:
        self.busy_until = max(self.busy_until, self.clock.now) + 1.0
        return TickingStep(self.clock, self.busy_until, super().launch(batch))


class TickingStep:
    def __init__(self, clock: Clock, ready: float, step: LateStep) -> None:
        self.clock = clock
        self.ready = ready
        self.step = step

    def result(self) -> StepOutput:
        self.clock.now = max(self.clock.now, self.ready)
        return self.step.result()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_time_of_a_step_leaves_out_pauses_without_one(steps_ahead):
    clock = Clock()
    times = []
    engine = make_engine(TickingRunner(clock, steps_ahead), clock)
    engine.delivery.record_step = times.append
    for request_id in (1, 2):
        clock.now += 100
        generate(engine, [request(request_id, [1], max_tokens=3, ignore_eos=True)])
    assert times == [1.0] * 6


@dataclass
class Plan:
    """One run of the property test: what arrives, and what happens when."""

    requests: list[Request]
    arrivals: list[int]  # the step before which each arrives
    cancels: dict[int, int]  # request id -> the step before which it is cancelled
    failing: set[int] = field(default_factory=set)


def play(plan: Plan, runner: PagedRunner, **changes: object) -> dict[int, list[TokenEvent]]:
    engine = make_engine(runner, **changes)
    events: dict[int, list[TokenEvent]] = defaultdict(list)
    step = 0
    while step <= max(plan.arrivals) or engine.has_work:
        new = [r for r, at in zip(plan.requests, plan.arrivals, strict=True) if at == step]
        for one in new:
            engine.submit(one)
        cancelled = [
            e for key, at in plan.cancels.items() if at == step for e in engine.cancel(key)
        ]
        for event in cancelled + engine.step():
            events[event.request_id].append(event)
        step += 1
        assert step < 5000, "some request never ends"
    assert engine.stats().num_free_blocks == runner.num_blocks
    assert runner.num_launched == runner.num_taken
    for mine in events.values():
        assert [event.is_last for event in mine] == [False] * (len(mine) - 1) + [True]
    return events


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    requests = []
    for request_id in range(draw(st.integers(1, 8))):
        max_tokens = draw(st.integers(1, 12))
        requests.append(
            request(
                request_id,
                draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)),
                max_tokens=max_tokens,
                min_tokens=draw(st.integers(0, max_tokens)),
                end_id=draw(st.sampled_from([None, 0, 2])),
                ignore_eos=draw(st.booleans()),
            )
        )
    num = len(requests)
    arrivals = draw(st.lists(st.integers(0, 12), min_size=num, max_size=num))
    ids = st.integers(0, num - 1)
    cancels = draw(st.dictionaries(ids, st.integers(0, 20), max_size=2))
    failing = draw(st.sets(st.integers(0, 15), max_size=1) | st.just(set()))
    return Plan(requests, arrivals, cancels, failing)


@settings(max_examples=150, deadline=None)
@given(
    plan=plans(),
    num_blocks=st.integers(5, 12),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 12),
    enable_prefix_caching=st.booleans(),
)
def test_working_ahead_changes_no_token(plan, num_blocks, **settings_of_the_engine):
    """Nor do cancellations, preemptions and failed steps in between matter."""
    logging.disable(logging.ERROR)
    try:
        runs = []
        for steps_ahead in (0, 1, 2):
            runner = PagedRunner(num_blocks, 4, steps_ahead)
            runner.failing_results = plan.failing
            runs.append(play(plan, runner, **settings_of_the_engine))
    finally:
        logging.disable(logging.NOTSET)
    untouched = [
        one.request_id
        for one in plan.requests
        if all(events[one.request_id][-1].error is None for events in runs)
        and one.request_id not in plan.cancels
    ]
    for one in plan.requests:
        outputs = [[i for e in events[one.request_id] for i in e.token_ids] for events in runs]
        for output in outputs:
            assert output == alone(one.prompt_ids, len(output))
        if one.request_id in untouched:
            assert outputs[0] == outputs[1] == outputs[2]
            assert len({events[one.request_id][-1].finish_reason for events in runs}) == 1
