"""Which requests of an open loop are measured."""

from __future__ import annotations

import itertools

from bench_reports import record
from inflight.cli.bench.serving.results.records import Record
from inflight.cli.bench.serving.results.window import CoolDown, Window, window
from inflight.cli.bench.serving.workload.arrivals import poisson


def test_a_window_ends_with_its_duration_or_its_number_of_requests() -> None:
    def arrivals() -> itertools.count[float]:
        return itertools.count(0.5, 0.5)  # 0.5, 1.0, 1.5, ...

    assert window(arrivals(), 2.0, None, 3.0) == Window(2.0, 5.0)
    # 2.0, 2.5, 3.0 and 3.5 are measured; the next one is due at 4.0.
    assert window(arrivals(), 2.0, 4, None) == Window(2.0, 4.0)
    assert window(arrivals(), 2.0, 4, 30.0) == Window(2.0, 4.0)
    assert window(arrivals(), 2.0, 400, 3.0) == Window(2.0, 5.0)


def test_a_window_has_as_many_requests_as_were_asked_for() -> None:
    found = window(poisson(20.0, "a"), 3.0, 250, None)
    times = itertools.takewhile(lambda at: at < found.until_s, poisson(20.0, "a"))
    assert sum(found.has(at) for at in times) == 250
    assert found.from_s == 3.0


def test_the_cool_down_lasts_until_each_request_has_ended_or_is_given_up() -> None:
    ended = record(0.0, (1.0, 1))
    running, hopeless = Record(sent=0.0, give_up=9.0), Record(sent=0.0, give_up=5.0)
    cool_down = CoolDown([ended, running, hopeless])
    assert not cool_down.is_over(4.0)
    assert not cool_down.is_over(6.0)
    running.ended = 7.0
    assert cool_down.is_over(8.0)
    assert CoolDown([Record(sent=0.0, give_up=9.0)]).is_over(9.0)
