"""The retry hint of a refusal: the estimated time to admit all queued requests."""

from __future__ import annotations

import pytest

from inflight.scheduling.drain_rate import MAX_RETRY_S, MIN_RETRY_S, DrainRate


def test_without_a_measurement_it_is_the_least() -> None:
    assert DrainRate().seconds_for(1000, now=5.0) == MIN_RETRY_S


@pytest.mark.parametrize(("num_requests", "seconds"), [(0, 1), (4, 1), (10, 3), (40, 10)])
def test_it_is_what_the_measured_rate_takes(num_requests: int, seconds: int) -> None:
    rate = DrainRate()
    for number in range(200):
        rate.admitted(1, now=100.0 + 0.25 * number)
    assert rate.seconds_for(num_requests, now=100.0 + 0.25 * 200) == seconds


def test_a_queue_that_stands_still_takes_longer_and_longer() -> None:
    rate = DrainRate()
    rate.admitted(8, now=0.0)
    found = [rate.seconds_for(8, now=now) for now in (0.0, 0.5, 5.0, 30.0, 3000.0)]
    assert found == [MIN_RETRY_S, 1, 5, 30, MAX_RETRY_S]


def test_the_time_before_a_queue_has_formed_does_not_count() -> None:
    rate = DrainRate()
    rate.admitted(1, now=0.0)
    rate.restart()
    assert rate.seconds_for(10, now=1000.0) == MIN_RETRY_S
    rate.admitted(10, now=1000.0)
    assert rate.seconds_for(10, now=1002.0) == 2
