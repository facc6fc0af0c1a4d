"""Open loops on an engine, over a runner that counts."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from counting_engine import make_engine
from fake_runner import CountingRunner
from inflight.cli.bench.poisson.engine_load import EngineLoad
from inflight.cli.bench.poisson.sender import Due, OpenLoop
from inflight.cli.bench.serving.results.figures import level
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.records import GIVEN_UP, times_of
from inflight.cli.bench.serving.results.report import Level
from inflight.cli.bench.serving.results.slo import Slo, parse
from inflight.cli.bench.serving.results.window import Window
from inflight.cli.bench.serving.workload.lengths import Shape
from inflight.core.batch import Batch, CompletedStep
from inflight.engine.engine import Engine
from inflight.errors import ConfigError
from waiting import PATIENCE_S

SHAPE = Shape(4, 5)
LENIENT = parse("ttft=100000,tpot=100000")


class HeldRunner(CountingRunner):
    """Calls a function before each step."""

    def __init__(self, before_step: Callable[[], object]) -> None:
        super().__init__(num_blocks=512)
        self._before_step = before_step

    def launch(self, batch: Batch) -> CompletedStep:
        self._before_step()
        return super().launch(batch)


def every(gap_s: float, then: Callable[[int], object] = lambda index: None) -> Iterator[Due]:
    """then: called with a request's index when the one before it has been sent."""
    for index in itertools.count():
        then(index)
        yield Due(index * gap_s, SHAPE)


def run(engine: Engine, planned: Iterator[Due], window: Window, slo: Slo = LENIENT) -> Measured:
    return EngineLoad(engine).run(OpenLoop(planned, window, slo.patience_s))


def figures(measured: Measured, slo: Slo = LENIENT) -> Level:
    return level("rate", 1, measured, slo, None)


def test_requests_of_the_window_are_measured_to_their_last_token() -> None:
    engine = make_engine(CountingRunner(num_blocks=512))
    found = figures(run(engine, every(0.01), Window(0.095, 0.395)))
    assert (found.num_requests, found.num_completed, found.meets_slo) == (30, 30, True)
    assert {(one.input_tokens, one.output_tokens) for one in found.requests} == {(4, 5)}
    assert found.goodput_per_s == pytest.approx(30 / 0.3)
    assert found.latency_ms["tpot"].count == 30
    assert not engine.has_work


def test_what_queues_while_the_engine_stalls_has_waited_since_it_was_due() -> None:
    """The first step ends when 20 requests have been sent. Counted from the submission after it,
    the latencies of 19 of them would not show the stall (coordinated omission)."""
    all_sent, resumed = threading.Event(), []

    def stall() -> None:
        if not resumed:
            assert all_sent.wait(PATIENCE_S)
            resumed.append(time.perf_counter())

    def then(index: int) -> None:
        if index == 20:
            all_sent.set()

    found = run(make_engine(HeldRunner(stall)), every(0.01, then), Window(0.0, 0.195))
    times = [times_of(one, found.started) for one in found.chosen()]
    assert len(times) == 20
    for index, one in enumerate(times):
        assert one.sent_s == pytest.approx(index * 0.01, abs=1e-5)
        assert one.ttft_ms is not None
        assert one.ttft_ms / 1e3 >= resumed[0] - found.started - one.sent_s - 1e-3
    assert times[0].ttft_ms is not None and times[0].ttft_ms >= 190.0


def test_an_engine_slower_than_the_rate_does_not_meet_the_slo() -> None:
    """At least 5 ms a step, one request at a time: at most 40 of 200 requests a second."""
    slo = parse("ttft=100,tpot=20")
    engine = make_engine(HeldRunner(lambda: time.sleep(0.005)), max_num_seqs=1)
    found = figures(run(engine, every(0.005), Window(0.1, 0.6), slo), slo)
    assert found.meets_slo is False
    assert found.errors[GIVEN_UP] > 0
    # Those that were given up had waited for 180 ms.
    assert found.latency_ms["ttft"].p99 > 180.0
    assert found.goodput_per_s is not None and found.goodput_per_s < 100.0
    assert not engine.has_work


def test_arrivals_go_on_until_the_measured_requests_have_ended() -> None:
    """Here they only end when 10 more have been sent after the window."""
    later = threading.Event()

    def then(index: int) -> None:
        if index == 30:
            later.set()

    engine = make_engine(HeldRunner(lambda: later.wait(PATIENCE_S)))
    found = run(engine, every(0.01, then), Window(0.0, 0.195))
    assert (len(found.chosen()), len(found.records) >= 30) == (20, True)
    assert figures(found).num_completed == 20


def test_refused_requests_are_failures() -> None:
    engine = make_engine()
    engine.drain_reason = "the server is stopping"
    found = figures(run(engine, every(0.01), Window(0.0, 0.095)))
    assert (found.errors, found.meets_slo) == ({"capacity": 10}, False)
    assert found.error_examples == {"capacity": "the server is stopping"}


def test_lengths_that_do_not_fit_end_the_run() -> None:
    def planned() -> Iterator[Due]:
        yield Due(0.0, SHAPE)
        raise ConfigError("the lengths do not fit")

    with pytest.raises(ConfigError, match="do not fit"):
        run(make_engine(), planned(), Window(0.0, 1.0))


def test_a_burst_warms_up_and_tells_how_many_requests_a_second_are_possible() -> None:
    engine = make_engine(CountingRunner(num_blocks=512))
    assert 0 < EngineLoad(engine).burst([SHAPE] * 10) < math.inf
    assert not engine.has_work


def test_progress_is_reported_while_a_loop_runs() -> None:
    found = []
    engine = make_engine(CountingRunner(num_blocks=512))
    loop = OpenLoop(every(0.01), Window(0.1, 0.6), LENIENT.patience_s)
    EngineLoad(engine).run(loop, found.append)
    assert found
    assert [one.num_sent for one in found] == sorted(one.num_sent for one in found)
