"""Closed and open loops, against a target without a server."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator

import pytest

from fake_target import FakeTarget
from inflight.cli.bench.serving.load import Limit, LoadGenerator
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.records import GIVEN_UP, UNFINISHED
from inflight.cli.bench.serving.results.window import Window
from inflight.cli.bench.serving.targets.target import Prompt
from inflight_client import ServerError, Unavailable

OUTPUT_LEN = 3


def generate(
    target: FakeTarget,
    limit: Limit,
    concurrency: int = 0,
    arrivals: Iterator[float] | None = None,
    stop_at: int = 0,
) -> Measured:
    """stop_at: stops once so many requests are in flight."""

    async def run() -> Measured:
        stop = asyncio.Event()
        numbers = itertools.count()
        generator = LoadGenerator(
            target, lambda: Prompt(f"prompt {next(numbers)}", OUTPUT_LEN), limit, stop
        )

        async def stop_in_time() -> None:
            while target.num_in_flight < stop_at:
                await asyncio.sleep(0.001)
            stop.set()

        stopping = asyncio.create_task(stop_in_time()) if stop_at else None
        if arrivals is not None:
            found = await generator.open(arrivals)
        else:
            found = await generator.closed(concurrency)
        if stopping is not None:
            await stopping
        return found

    return asyncio.run(run())


def every(seconds: float) -> Iterator[float]:
    return itertools.count(seconds, seconds)


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    target = FakeTarget(ttft_s=0.002, itl_s=0.001)
    found = generate(target, Limit(30), concurrency=4)
    assert (len(found.records), target.max_in_flight) == (30, 4)
    assert all(len(one.arrivals) == OUTPUT_LEN and not one.error for one in found.records)
    assert not found.is_interrupted


def test_prompts_differ() -> None:
    target = FakeTarget()
    generate(target, Limit(20), concurrency=4)
    assert len({prompt.text for prompt in target.prompts}) == 20


def test_an_open_loop_sends_whether_or_not_requests_are_answered() -> None:
    """None is answered before all are sent."""
    target = FakeTarget(held_until=20)
    found = generate(target, Limit(20), arrivals=every(0.005))
    assert target.max_in_flight == 20
    assert [one.error for one in found.records] == [""] * 20
    assert len(found.late_s) == 20


def test_arrivals_of_an_open_loop_do_not_depend_on_the_answers() -> None:
    """Slow and fast targets get requests at the same times, up to the lateness of the loop."""

    def sent(ttft_s: float) -> list[float]:
        found = generate(
            FakeTarget(ttft_s), Limit(10), arrivals=iter([i * 0.02 for i in range(10)])
        )
        late = found.late_s
        # What was sent late was late by what is reported, not by what the target did.
        return [
            one.sent - found.started - index * 0.02 - late[index]
            for index, one in enumerate(found.records)
        ]

    for ttft_s in (0.0, 0.5):
        found = [sent(ttft_s)]
        # A pause between the measured lateness and the sending is that of a busy machine.
        while not all(-0.001 <= offset < 0.05 for offset in found[-1]):
            assert len(found) < 5, found
            found.append(sent(ttft_s))


def test_an_open_loop_ends_with_its_duration() -> None:
    found = generate(FakeTarget(), Limit(duration_s=0.2), arrivals=every(0.01))
    # 0.01, 0.02, ..., 0.19, and 0.20 if the sum falls short of it.
    assert len(found.records) in (19, 20)
    assert found.window_s == 0.2


def test_an_open_loop_without_arrivals_lasts_as_long() -> None:
    found = generate(FakeTarget(), Limit(duration_s=0.1), arrivals=iter([5.0]))
    assert (found.records, found.window_s) == ([], 0.1)


def test_requests_in_flight_at_the_end_of_the_duration_are_completed() -> None:
    found = generate(FakeTarget(ttft_s=1.2), Limit(duration_s=1.0), concurrency=2)
    assert [one.error for one in found.records] == [""] * 2
    # What arrives after the duration is not part of the window.
    assert found.window_s == 1.0 < found.elapsed_s


def test_errors_are_recorded_by_kind_and_the_load_goes_on() -> None:
    errors = [Unavailable("full"), ServerError("broken"), Unavailable("full again")]
    found = generate(FakeTarget(errors=errors), Limit(6), concurrency=1)
    kinds = [one.error for one in found.records]
    assert kinds == ["Unavailable", "ServerError", "Unavailable", "", "", ""]
    assert found.examples == {"Unavailable": "full", "ServerError": "broken"}


@pytest.mark.parametrize(
    "load",
    [lambda: {"concurrency": 3}, lambda: {"arrivals": iter([0.0, 0.001, 0.002, 300.0])}],
    ids=["closed", "open"],
)
def test_stopping_cancels_what_is_in_flight(load: Callable[[], dict[str, object]]) -> None:
    target = FakeTarget(ttft_s=300.0)
    found = generate(target, Limit(100), stop_at=3, **load())  # type: ignore[arg-type]
    assert found.is_interrupted
    assert (target.num_in_flight, target.num_cancelled) == (0, 3)
    assert [one.error for one in found.records] == [UNFINISHED] * 3


def test_a_bug_in_a_target_ends_the_run() -> None:
    """Only a client's errors are results."""
    target = FakeTarget(errors=[ValueError("a bug")])  # type: ignore[list-item]
    with pytest.raises(ExceptionGroup) as caught:
        generate(target, Limit(5), concurrency=2)
    assert caught.group_contains(ValueError, match="a bug")


def steady(target: FakeTarget, window: Window, patience_s: float = math.inf) -> Measured:
    """A request every 10 ms."""

    async def run() -> Measured:
        generator = LoadGenerator(
            target, lambda: Prompt("prompt", OUTPUT_LEN), Limit(ramp_s=0.1), asyncio.Event()
        )
        return await generator.steady(every(0.01), window, lambda num_tokens: patience_s)

    return asyncio.run(run())


def test_a_steady_loop_sends_until_the_requests_of_its_window_have_ended() -> None:
    """None is answered before 40 are in flight, 10 of them measured."""
    target = FakeTarget(held_until=40)
    found = steady(target, Window(0.095, 0.195))
    chosen = found.chosen()
    assert len(chosen) == 10
    assert [one.error for one in chosen] == [""] * 10
    assert len(found.records) >= 40
    assert found.window_s == pytest.approx(0.1)
    # Those that were still running were cancelled.
    assert target.num_in_flight == 0


def test_requests_of_the_window_that_have_missed_the_slo_are_given_up() -> None:
    found = steady(FakeTarget(ttft_s=300.0), Window(0.095, 0.195), patience_s=0.05)
    assert [one.error for one in found.chosen()] == [GIVEN_UP] * 10
    assert "could no longer meet the SLO" in found.examples[GIVEN_UP]


def test_latencies_of_an_open_loop_begin_when_a_request_is_due() -> None:
    found = generate(FakeTarget(), Limit(5), arrivals=every(0.005))
    for index, one in enumerate(found.records, 1):
        assert one.began - found.started == pytest.approx(index * 0.005, abs=1e-6)
        assert one.began <= one.sent
