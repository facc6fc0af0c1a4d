"""The engine's bookkeeping, over a runner that only counts."""

from __future__ import annotations

import logging

import msgspec
import pytest

from counting_engine import Clock, make_engine, request, run
from fake_runner import CountingRunner, PagedRunner, alone, next_token
from inflight.config import SpeculativeConfig
from inflight.core.request import FinishReason
from inflight.engine.engine import Engine, generate
from inflight.engine.pipeline import MAX_CONSECUTIVE_FAILURES
from inflight.errors import CapacityError, RequestError
from inflight.scheduling.draft_budget import StepCosts, StepTimes


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


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_first_of_several_stop_tokens_ends_the_output(ignore_eos):
    engine = make_engine()
    stops = (7, 44, 42)
    engine.submit(request(1, [40], max_tokens=10, stop_token_ids=stops, ignore_eos=ignore_eos))
    assert [i for e in run(engine)[1] for i in e.token_ids] == [41, 42]


def test_max_tokens_is_cut_to_the_context():
    engine = make_engine()
    engine.submit(request(1, [1] * 60, max_tokens=50, ignore_eos=True))
    assert run(engine)[1][-1].position == 4
    engine.submit(request(2, [1] * 50, max_tokens=-1, ignore_eos=True))
    last = run(engine)[2][-1]
    assert (last.position, last.finish_reason) == (14, FinishReason.LENGTH)


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


# ---------------------------------------------------------------- drafts


def drafting_engine(steps_ahead: int, default: int | str = 3, vocab_size: int = 3) -> Engine:
    runner = PagedRunner(steps_ahead=steps_ahead, vocab_size=vocab_size)
    runner.step_costs = StepCosts(StepTimes((1, 64), (1.0, 1.1)))

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
