"""What a step may take follows from the steps before it."""

from __future__ import annotations

from inflight.engine.step_times import MARGIN, UNKNOWN_S, StepTimes


def test_a_first_step_may_take_long() -> None:
    assert StepTimes().bound_s(1) == UNKNOWN_S


def test_the_slowest_step_of_its_size_bounds_a_step() -> None:
    times = StepTimes()
    for seconds in (0.01, 0.03, 0.02):
        times.record(32, seconds)
    assert times.bound_s(32) == MARGIN * 0.03
    assert times.bound_s(63) == MARGIN * 0.03, "of the same power of two"


def test_a_larger_step_bounds_a_smaller_one() -> None:
    times = StepTimes()
    times.record(1, 0.05)
    times.record(512, 0.4)
    times.record(8192, 6.0)
    assert times.bound_s(300) == MARGIN * 0.4
    assert times.bound_s(1) == MARGIN * 0.05


def test_a_long_prefill_may_take_as_long_as_its_tokens_one_by_one() -> None:
    times = StepTimes()
    times.record(1, 0.02)
    assert times.bound_s(1024) >= 1024 * 0.02
    times.record(256, 0.1)
    assert times.bound_s(1024) == MARGIN * 0.1 * 4
