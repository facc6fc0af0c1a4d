"""The engine's bookkeeping, over a runner that only counts."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import CountingRunner, LateStep, PagedRunner, alone, next_token
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.batch import Batch, StepOutput
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.engine import Engine, generate
from inflight.engine.pipeline import MAX_CONSECUTIVE_FAILURES
from inflight.errors import CapacityError, RequestError
from inflight.sampling.params import SamplingParams
from inflight.scheduling.draft_budget import StepCosts

EOS = 99


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    runner: CountingRunner | PagedRunner | None = None,
    clock: Clock | None = None,
    **settings: object,
):
    config = EngineConfig(model="none", **settings)  # type: ignore[arg-type]
    runner = runner or CountingRunner()
    if clock is None:
        return Engine(config, runner, max_model_len=64, eos_token_ids=[EOS])
    return Engine(config, runner, max_model_len=64, eos_token_ids=[EOS], clock=clock)


def request(request_id: int, prompt: list[int], acknowledged: bool = False, **params: object):
    return Request(request_id, prompt, SamplingParams(**params), acknowledged=acknowledged)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def test_generate_returns_ids_by_request():
    engine = make_engine()
    outputs = generate(engine, [request(1, [5], max_tokens=3), request(2, [10, 20], max_tokens=2)])
    assert outputs == {1: [6, 7, 8], 2: [21, 22]}


def test_the_end_of_sequence_token_stops():
    engine = make_engine()
    engine.submit(request(1, [96], max_tokens=10))
    last = run(engine)[1][-1]
    assert last.finish_reason == FinishReason.STOP
    assert last.position == 3


def test_ignore_eos_continues_until_max_tokens():
    engine = make_engine()
    engine.submit(request(1, [97], max_tokens=4, ignore_eos=True))
    events = run(engine)[1]
    assert [i for e in events for i in e.token_ids] == [98, 99, 0, 1]
    assert events[-1].finish_reason == FinishReason.LENGTH


def test_end_id_stops_as_well():
    engine = make_engine()
    engine.submit(request(1, [40], max_tokens=10, end_id=42))
    assert [i for e in run(engine)[1] for i in e.token_ids] == [41, 42]


def test_max_tokens_is_cut_to_the_context():
    engine = make_engine()
    engine.submit(request(1, [1] * 60, max_tokens=50, ignore_eos=True))
    assert run(engine)[1][-1].position == 4


def test_the_cumulative_logprob_adds_up():
    engine = make_engine()
    engine.submit(request(1, [1], max_tokens=3))
    assert run(engine)[1][-1].cumulative_logprob == pytest.approx(-1.5)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "input_ids"),
        ([100], {}, "input_ids.*100.*0 to 99"),
        ([-1], {}, "input_ids.*-1"),
        ([1] * 64, {}, "maximum context length is 64 tokens"),
        ([1], {"end_id": 100}, "end_id"),
        ([1], {"stop_words": ("x",)}, "stop_words"),
        ([1], {"bad_words": ("x",)}, "bad_words"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(prompt, params, named):
    engine = make_engine()
    with pytest.raises(RequestError, match=named):
        engine.submit(request(1, prompt, **params))
    assert engine.stats().num_waiting == 0


def test_a_request_larger_than_the_pool_is_refused():
    engine = make_engine(CountingRunner(num_blocks=4))
    with pytest.raises(RequestError):
        engine.submit(request(1, [1] * 10, max_tokens=20))


def test_a_default_length_is_cut_to_the_pool():
    engine = make_engine(CountingRunner(num_blocks=4))
    engine.submit(request(1, [1] * 10, ignore_eos=True))
    assert run(engine)[1][-1].position == 6


def test_the_queue_has_an_end():
    engine = make_engine(max_waiting=2)
    engine.submit(request(1, [1]))
    engine.submit(request(2, [1]))
    with pytest.raises(CapacityError):
        engine.submit(request(3, [1]))


def test_a_draining_engine_takes_nothing_new_and_finishes_the_rest():
    engine = make_engine()
    engine.submit(request(1, [1], max_tokens=2))
    engine.drain_reason = "the server is stopping"
    with pytest.raises(CapacityError):
        engine.submit(request(2, [1]))
    assert run(engine)[1][-1].finish_reason == FinishReason.LENGTH


def test_an_id_in_use_is_refused():
    engine = make_engine()
    engine.submit(request(1, [1]))
    with pytest.raises(RequestError):
        engine.submit(request(1, [1]))


def test_cancel_works_while_queued_while_running_and_after_the_end():
    engine = make_engine()
    engine.submit(request(1, [1], max_tokens=50))
    assert engine.cancel(1)[0].finish_reason == FinishReason.CANCELLED
    engine.submit(request(2, [1], max_tokens=50))
    engine.step()
    (event,) = engine.cancel(2)
    assert (event.finish_reason, event.position) == (FinishReason.CANCELLED, 1)
    assert engine.cancel(2) == []
    assert engine.cancel(77) == []
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_an_error_of_one_sequence_ends_that_one_alone():
    runner = CountingRunner()
    runner.poisoned = {1}
    engine = make_engine(runner)
    engine.submit(request(1, [1], max_tokens=3))
    engine.submit(request(2, [5], max_tokens=3))
    events = run(engine)
    assert events[1][-1].error_kind == "engine"
    assert [i for e in events[2] for i in e.token_ids] == [6, 7, 8]


def test_a_failed_step_ends_its_requests_and_the_engine_continues(caplog):
    runner = CountingRunner()
    engine = make_engine(runner)
    engine.submit(request(1, [1], max_tokens=3))
    runner.raises = RuntimeError("secret at 0x7f00")
    with caplog.at_level(logging.CRITICAL):
        (event,) = engine.step()
    assert event.error_kind == "engine"
    assert "0x7f00" not in (event.error or "")
    runner.raises = None
    assert generate(engine, [request(2, [5], max_tokens=1)]) == {2: [6]}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_an_engine_of_which_step_after_step_fails_is_broken(caplog):
    runner = CountingRunner()
    engine = make_engine(runner)

    def fail(count: int, first_id: int) -> None:
        runner.raises = RuntimeError("the device is lost")
        for request_id in range(first_id, first_id + count):
            engine.submit(request(request_id, [1], max_tokens=1))
            with caplog.at_level(logging.CRITICAL):
                engine.step()
        runner.raises = None

    fail(MAX_CONSECUTIVE_FAILURES - 1, 10)
    assert not engine.is_broken
    assert generate(engine, [request(1, [5], max_tokens=1)]) == {1: [6]}
    fail(MAX_CONSECUTIVE_FAILURES - 1, 20)
    assert not engine.is_broken  # one that worked was between them
    fail(1, 30)
    assert engine.is_broken


def test_a_silent_consumer_is_set_aside_and_comes_back():
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.submit(request(1, [1], acknowledged=True, max_tokens=60))
    engine.step()
    engine.delivered([(1, 1)])
    engine.step()
    clock.now += 0.5
    assert engine.sweep() == []
    stats = engine.stats()
    assert (stats.num_running, stats.num_suspended) == (0, 1)
    assert stats.num_free_blocks == stats.num_blocks
    engine.delivered([(1, 2)])
    engine.step()
    assert engine.stats().num_running == 1


def test_a_consumer_that_remains_silent_is_dropped():
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.submit(request(1, [1], acknowledged=True, max_tokens=60))
    engine.step()
    engine.delivered([(1, 1)])
    engine.step()
    clock.now += 0.5
    engine.sweep()
    clock.now += 60
    (event,) = engine.sweep()
    assert event.finish_reason == FinishReason.CANCELLED
    assert not engine.has_work
    assert not engine.has_suspended


def test_a_direct_request_needs_no_acknowledgement():
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.submit(request(1, [1], max_tokens=60))
    engine.step()
    clock.now += 60
    assert engine.sweep() == []
    assert engine.stats().num_running == 1


def test_only_requests_of_a_disconnected_front_are_cancelled():
    engine = make_engine()
    engine.submit(request(1 << 32 | 1, [1], max_tokens=60))
    engine.submit(request(2 << 32 | 1, [1], max_tokens=60))
    engine.step()
    engine.cancel_front(1)
    assert engine.stats().num_running == 1


# ---------------------------------------------------------------- one step ahead


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


# ---------------------------------------------------------------- drafts


def drafting_engine(steps_ahead: int, default: int | str = 3, vocab_size: int = 3) -> Engine:
    runner = PagedRunner(steps_ahead=steps_ahead, vocab_size=vocab_size)
    runner.step_costs = StepCosts((1, 64), (1.0, 1.1))

    def draft(token_ids: list[int], count: int) -> list[int]:
        """Right, but for one in seven."""
        drafts: list[int] = []
        for _ in range(count):
            right = next_token([*token_ids, *drafts], vocab_size)
            is_right = (len(token_ids) + len(drafts)) % 7
            drafts.append(right if is_right else (right + 1) % vocab_size)
        return drafts

    runner.draft = draft
    return make_engine(
        runner, speculative_config=SpeculativeConfig(num_speculative_tokens=4, default=default)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("default", [1, 4, "auto"])
def test_speculative_decoding_changes_only_the_speed(steps_ahead: int, default: int | str) -> None:
    engine = drafting_engine(steps_ahead, default)
    prompts = {i: [i % 3, 1, 2] for i in range(5)}
    outputs = generate(engine, [request(i, p, max_tokens=40) for i, p in prompts.items()])
    assert outputs == {i: alone(prompt, 40) for i, prompt in prompts.items()}
    stats = engine.stats()
    assert stats.num_output_tokens == 5 * 40
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert stats.num_steps < 40


def test_a_request_may_ask_for_no_drafts_or_for_so_many() -> None:
    engine = drafting_engine(1)
    plain = msgspec.structs.replace(request(1, [1, 2], max_tokens=30), speculation=0)
    assert generate(engine, [plain])[1] == alone([1, 2], 30)
    assert engine.stats().num_drafted_tokens == 0
    two = msgspec.structs.replace(request(2, [1, 2], max_tokens=30), speculation=2)
    engine.submit(two)
    while engine.has_work:
        for event in engine.step():
            assert len(event.token_ids) <= 3
    assert engine.stats().num_drafted_tokens > 0


def test_drafts_past_the_end_are_discarded() -> None:
    """The end token comes in the middle of several that are right."""
    found = set()
    for prompt in range(60):
        engine = drafting_engine(1, 4, vocab_size=100)
        engine.admission.eos_token_ids = frozenset(range(0, 100, 9))
        engine.submit(request(1, [prompt], max_tokens=40))
        events = run(engine)[1]
        ids = [token for event in events for token in event.token_ids]
        expected = alone([prompt], 40, 100)
        end = next((i for i, token in enumerate(expected) if token % 9 == 0), 39)
        assert ids == expected[: end + 1]
        assert events[-1].cumulative_logprob == pytest.approx(-0.5 * len(ids))
        assert engine.stats().num_output_tokens == len(ids)
        found.add(len(events[-1].token_ids))
    assert found >= {1, 2, 3, 4}, "the end stood at each place among the drafts"


def test_there_are_no_drafts_before_min_tokens() -> None:
    engine = drafting_engine(1)
    engine.submit(request(1, [1, 2], max_tokens=30, min_tokens=12))
    sizes = [len(event.token_ids) for event in run(engine)[1]]
    assert sizes[:11] == [1] * 11
    assert max(sizes) > 1


# ---------------------------------------------------------------- siblings


def siblings(prompt: list[int], count: int, **params: object) -> list[Request]:
    return [
        msgspec.structs.replace(request(i, prompt, **params), sibling=1 if i > 1 else None)
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("length", [3, 16, 17])
def test_siblings_compute_their_prompt_once(steps_ahead: int, length: int) -> None:
    prompt = [i % 3 for i in range(length)]
    engine = make_engine(PagedRunner(steps_ahead=steps_ahead), max_num_batched_tokens=64)
    outputs = generate(engine, siblings(prompt, 4, max_tokens=6))
    assert outputs == {i: alone(prompt, 6) for i in range(1, 5)}
    # Of blocks of 4 tokens; the last token of a prompt is always computed.
    assert engine.stats().num_cached_tokens == 3 * min(length // 4 * 4, length - 1)


@pytest.mark.parametrize("how", ["cancelled", "failed", "refused"])
def test_siblings_continue_after_the_first_has_ended(how: str) -> None:
    runner = PagedRunner()
    engine = make_engine(runner, max_waiting=8)
    first, *others = siblings([1, 2], 3, max_tokens=5)
    if how == "failed":
        runner.poisoned = {1}
    if how != "refused":
        engine.submit(first)
    for one in others:
        engine.submit(one)
    if how == "cancelled":
        engine.cancel(1)
    events = run(engine)
    for one in others:
        ids = [token for event in events[one.request_id] for token in event.token_ids]
        assert ids == alone([1, 2], 5)
    assert not engine.has_work


def test_a_request_without_siblings_does_not_wait() -> None:
    engine = make_engine(PagedRunner(), max_num_batched_tokens=64)
    for request_id in range(3):  # an id of 0 is one like any other
        engine.submit(request(request_id, [1, 2], max_tokens=5))
    assert len(engine.scheduler.waiting) == 3


def test_a_sibling_that_waits_can_be_cancelled() -> None:
    engine = make_engine(PagedRunner())
    for one in siblings([1, 2], 2, max_tokens=5):
        engine.submit(one)
    assert engine.cancel(2)[0].finish_reason is FinishReason.CANCELLED
    assert set(run(engine)) == {1}
    assert engine.scheduler.num_free_blocks == 64
