"""The engine's bookkeeping, over a runner that only counts."""

from __future__ import annotations

import logging

import pytest

from fake_runner import CountingRunner
from inflight.config import EngineConfig
from inflight.engine import Engine, generate
from inflight.errors import CapacityError, RequestError
from inflight.request import FinishReason, Request, TokenEvent
from inflight.sampling import SamplingParams

EOS = 99


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    runner: CountingRunner | None = None, clock: Clock | None = None, **settings: object
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


def test_ignore_eos_goes_on_and_length_ends_it():
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
    engine.draining = True
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


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(caplog):
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


def test_a_consumer_that_stays_silent_is_given_up():
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


def test_a_front_that_left_takes_only_its_requests_along():
    engine = make_engine()
    engine.submit(request(1 << 32 | 1, [1], max_tokens=60))
    engine.submit(request(2 << 32 | 1, [1], max_tokens=60))
    engine.step()
    engine.cancel_front(1)
    assert engine.stats().num_running == 1
