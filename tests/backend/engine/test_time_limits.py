"""Deadlines and queue timeouts: nothing is computed for a request that is out of time."""

from __future__ import annotations

import msgspec
import pytest

from counting_engine import Clock, make_engine, request, run
from fake_runner import CountingRunner, PagedRunner
from inflight.core.request import PriorityClass, Request, TokenEvent
from inflight.engine.engine import Engine
from inflight.errors import CapacityError, DeadlineError

STEP_S = 0.01


def with_deadline(request_id: int, deadline_ms: int, max_tokens: int = 40) -> Request:
    made = request(request_id, [request_id], max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(made, deadline_ms=deadline_ms)


def run_until(engine: Engine, clock: Clock, now: float) -> list[TokenEvent]:
    """The engine's loop, with steps of STEP_S."""
    events = []
    while clock.now < now:
        clock.now += STEP_S
        events += engine.sweep()
        events += engine.step()
    return events


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_nothing_is_computed_after_a_deadline(steps_ahead: int) -> None:
    clock, runner = Clock(), PagedRunner(steps_ahead=steps_ahead)
    engine = make_engine(runner, clock)
    engine.submit(with_deadline(1, 95))
    engine.submit(with_deadline(2, 10_000))
    run_until(engine, clock, 0.08)
    num_computed = runner.num_launched
    events = run_until(engine, clock, 0.5)
    (last,) = [event for event in events if event.request_id == 1 and event.is_last]
    assert (last.error_kind, last.finish_reason) == ("deadline", None)
    assert last.error == (
        f"deadline_ms: the request was not complete 95 ms after its arrival (it had "
        f"{9 - steps_ahead} output tokens); allow it more time, or send it when the load is lower"
    )
    assert [event for event in events if event.request_id == 1][-1] is last, "nothing follows"
    assert num_computed < runner.num_launched
    (other,) = [event for event in events if event.request_id == 2 and event.is_last]
    assert (other.position, other.error) == (40, None), "the other one goes on"
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert not engine._deadlines and not engine.has_work


def test_no_step_after_its_deadline_has_a_request() -> None:
    clock, runner = Clock(), CountingRunner()
    engine = make_engine(runner, clock)
    engine.submit(with_deadline(1, 50))
    run_until(engine, clock, 0.2)
    assert len(runner.batches) == 4


def test_a_queued_request_is_dropped_at_its_deadline() -> None:
    clock, runner = Clock(), CountingRunner()
    engine = make_engine(runner, clock, max_num_seqs=1)
    engine.submit(with_deadline(1, 10_000))
    engine.submit(with_deadline(2, 50))
    events = run_until(engine, clock, 0.3)
    (event,) = [event for event in events if event.request_id == 2]
    assert event.error_kind == "deadline" and "0 output tokens" in (event.error or "")
    assert all(one.sequence.request_id == 1 for batch in runner.batches for one in batch.chunks)
    metrics = engine.metrics()
    assert metrics.value("deadline_misses", "queued") == 1
    assert metrics.value("request_errors", "deadline") == 1


def test_a_deadline_counts_from_the_arrival_at_the_front() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    clock.now = 100.0
    with pytest.raises(DeadlineError, match=r"not complete 500 ms after its arrival \(it had not"):
        engine.submit(with_deadline(1, 500), arrived=99.5)
    assert not engine.has_work and engine.stats().num_waiting == 0
    engine.submit(with_deadline(2, 600), arrived=99.5)
    assert engine.sweep() == []
    clock.now = 100.101
    (event,) = engine.sweep()
    assert event.error_kind == "deadline"
    metrics = engine.metrics()
    assert metrics.value("deadline_misses", "queued") == 2
    assert metrics.value("requests_refused", "deadline", "engine") == 1


def test_a_request_that_is_complete_in_time_has_no_error() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.submit(with_deadline(1, 1000, max_tokens=3))
    assert run(engine)[1][-1].position == 3
    clock.now = 5.0
    assert engine.sweep() == []
    assert engine.metrics().value("deadline_misses", "started") == 0


def test_a_deadline_ends_a_suspended_request_and_a_search() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.submit(with_deadline(1, 100))
    run_until(engine, clock, 0.02)
    engine.scheduler.suspend(next(iter(engine.scheduler.running)))
    beams = request(2, [1], max_tokens=20, beam_width=2)
    outputs = msgspec.structs.replace(beams, output_ids=(2, 3), deadline_ms=100)
    engine.submit(outputs)
    clock.now = 1.0
    assert {(event.request_id, event.error_kind) for event in engine.sweep()} == {
        (1, "deadline"),
        (2, "deadline"),
    }
    assert engine.metrics().value("deadline_misses", "started") == 1
    assert not engine._groups


def test_a_request_is_queued_no_longer_than_the_models_timeout() -> None:
    clock, runner = Clock(), CountingRunner()
    engine = make_engine(runner, clock, max_num_seqs=1, queue_timeout_s=0.2)
    engine.submit(request(1, [1], max_tokens=40, ignore_eos=True))
    engine.submit(request(2, [2], max_tokens=40))
    events = run_until(engine, clock, 0.6)
    (event,) = [event for event in events if event.request_id == 2]
    assert event.error_kind == "capacity"
    assert event.error == (
        "the request was queued for 0.2 s, the queue_timeout_s of this model; retry in 1 s"
    )
    (last,) = [event for event in events if event.request_id == 1 and event.is_last]
    assert last.position == 40, "the one that runs has no such limit"
    assert engine.metrics().value("queue_timeouts") == 1


def test_the_surplus_is_refused_at_once_and_all_others_are_served() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_num_seqs=2, max_waiting=4)
    served, refused, request_id = 0, [], 0
    events: list[TokenEvent] = []
    for _ in range(100):  # three times as many as it can serve
        for _ in range(3):
            request_id += 1
            try:
                engine.submit(request(request_id, [1], max_tokens=2, ignore_eos=True))
                served += 1
            except CapacityError as error:
                refused.append(str(error))
        events += run_until(engine, clock, clock.now + STEP_S)
    events += run_until(engine, clock, clock.now + 1.0)
    assert len([event for event in events if event.finish_reason == "length"]) == served
    assert served >= 100 and len(refused) == 300 - served
    assert set(refused) == {"4 requests are waiting (max_waiting is 4); retry in 1 s"}
    assert engine.metrics().value("queue_refusals", "max_waiting") == len(refused)


def test_a_refusal_estimates_when_the_queue_will_have_drained() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_num_seqs=1, max_waiting=4)
    for request_id in range(1, 6):
        engine.submit(request(request_id, [1], max_tokens=4, ignore_eos=True))
        if request_id == 1:
            engine.step()
    for _ in range(8):  # one request a minute
        clock.now += 15.0
        engine.step()
    for request_id in range(6, 99):
        try:
            engine.submit(request(request_id, [1], max_tokens=4))
        except CapacityError as error:
            assert str(error).endswith("retry in 60 s"), "at most a minute, whatever it takes"
            break
    assert request_id < 10


def test_the_queue_is_measured_by_class() -> None:
    engine = make_engine(max_waiting_tokens=10)
    engine.submit(request(1, [1, 2, 3]))
    batch = msgspec.structs.replace(request(2, [1, 2]), priority_class=PriorityClass.BATCH)
    engine.submit(batch)
    with pytest.raises(CapacityError, match="5 prompt tokens are waiting"):
        engine.submit(request(3, [1] * 6))
    metrics = engine.metrics()
    assert metrics.value("num_requests_queued", "interactive") == 1
    assert metrics.value("num_requests_queued", "batch") == 1
    assert metrics.value("num_prompt_tokens_queued", "interactive") == 3
    assert metrics.value("num_prompt_tokens_queued", "batch") == 2
    assert metrics.value("queue_refusals", "max_waiting_tokens") == 1
