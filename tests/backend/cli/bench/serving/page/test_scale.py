"""Axes of charts."""

from __future__ import annotations

import pytest

from inflight.cli.bench.serving.page.scale import levels, linear, logarithmic


@pytest.mark.parametrize(
    ("value", "ticks"),
    [
        (0.9, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (57, (0, 10, 20, 30, 40, 50, 60)),
        (1200, (0, 200, 400, 600, 800, 1000, 1200)),
        (0, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_linear_ticks_are_round_and_reach_the_largest_value(
    value: float, ticks: tuple[float, ...]
) -> None:
    scale = linear([value / 3, value])
    assert scale.ticks == pytest.approx(ticks)
    assert scale.place(0) == 0 and scale.place(scale.high) == 1


def test_logarithmic_places_are_equal_for_equal_ratios() -> None:
    scale = logarithmic([0.5, 3, 500])
    assert scale.place(5) - scale.place(0.5) == pytest.approx(scale.place(500) - scale.place(50))
    assert scale.ticks == (1.0, 10.0, 100.0)


def test_a_single_value_has_an_axis_around_it() -> None:
    assert 0 < logarithmic([7.0]).place(7.0) < 1


def test_levels_have_a_tick_each() -> None:
    assert levels([1, 4, 16]).is_log and levels([1, 4, 16]).ticks == (1, 4, 16)
    assert levels([2, 4]).ticks == (0.0, 2, 4)
    assert levels([3]).place(3) == 1


def test_levels_that_are_close_to_each_other_share_a_tick() -> None:
    assert levels([4, 4.76, 4.97, 5.19, 5.66, 8]).ticks == (0.0, 4, 4.76, 5.66, 8)
    assert levels([64, 60, 1, 4]).ticks == (1, 4, 60)
