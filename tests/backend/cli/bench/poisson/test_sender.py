"""Requests are sent when they are due."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from counting_engine import request
from inflight.cli.bench.poisson.sender import Due, OpenLoop, Sender
from inflight.cli.bench.serving.results.window import Window
from inflight.cli.bench.serving.workload.lengths import Shape
from inflight.core.request import Request
from inflight.errors import ConfigError
from waiting import wait_until

SHAPE = Shape(2, 3)


def make(shape: Shape) -> Request:
    return request(1, [5] * shape.input_len, max_tokens=shape.output_len)


def loop(planned: Iterator[Due]) -> OpenLoop:
    return OpenLoop(planned, Window(0.05, 0.08), float)


def test_requests_are_sent_in_order_and_not_before_they_are_due() -> None:
    planned = (Due(index * 0.01, SHAPE) for index in itertools.count())
    with Sender(loop(planned), make) as sender:
        wait_until(lambda: sender.num_sent >= 10)
        records = [record for record, _ in sender.take()]
    for index, one in enumerate(records):
        assert one.due == pytest.approx(sender.started + index * 0.01)
        assert one.began <= one.sent
        assert (one.num_input_tokens, one.give_up) == (2, one.began + 3.0)
        assert one.is_measured == (5 <= index < 8)
    assert sender.late_s[:10] == pytest.approx([one.sent - one.began for one in records[:10]])


def test_the_second_of_two_requests_is_late_if_the_first_one_takes_its_time() -> None:
    """It is sent late and knows when it was due, so its user's wait is not lost."""

    def slow(shape: Shape) -> Request:
        while time.perf_counter() < sender.started + 0.1:
            pass
        return make(shape)

    planned = iter([Due(0.0, SHAPE), Due(0.02, SHAPE)])
    sender = Sender(loop(planned), slow)
    with sender:
        wait_until(lambda: sender.num_sent == 2)
        _, (late, _) = sender.take()
    assert sender.late_s[1] >= 0.08 - 1e-6
    assert late.sent - late.began == sender.late_s[1]


def test_an_error_in_the_thread_is_raised_by_the_one_that_measures() -> None:
    def planned() -> Iterator[Due]:
        yield Due(0.0, SHAPE)
        raise ConfigError("the lengths do not fit")

    with Sender(loop(planned()), make) as sender, pytest.raises(ConfigError):
        wait_until(lambda: list(sender.take()) and False)
