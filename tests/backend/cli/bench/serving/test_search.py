"""The search for the highest rate."""

from __future__ import annotations

import itertools

import pytest

from inflight.cli.bench.serving.search import MAX_DOUBLINGS, TOLERANCE, RateSearch


def search(first: float, capacity: float) -> tuple[RateSearch, list[float]]:
    """With the rates that were tried; those up to the capacity meet the SLO."""
    found, tried = RateSearch(first), []
    while (rate := found.next()) is not None:
        tried.append(rate)
        found.tried(rate, rate <= capacity)
        assert len(tried) < 50
    return found, tried


@pytest.mark.parametrize(
    ("first", "capacity"), list(itertools.product((0.01, 1.0, 37.0), (0.02, 0.3, 1.0, 33.3)))
)
def test_it_ends_close_to_the_capacity(first: float, capacity: float) -> None:
    found, tried = search(first * capacity, capacity)
    if found.met is not None and found.missed is not None:
        assert found.met <= capacity < found.missed
        assert found.missed <= found.met * (1 + TOLERANCE) * 1.01  # rates have three digits
    else:
        assert first == 0.01 and found.met is not None  # further away than it looks
    assert len(set(tried)) == len(tried) <= 12


def test_it_gives_up_if_no_rate_meets_the_slo_or_all_do() -> None:
    never, tried = search(10.0, 0.0)
    assert (never.met, tried[-1]) == (None, pytest.approx(10.0 / 2**MAX_DOUBLINGS, rel=0.01))
    always, tried = search(10.0, float("inf"))
    assert (always.met, always.missed) == (10.0 * 2**MAX_DOUBLINGS, None)


def test_an_answer_that_varies_does_not_keep_it_going() -> None:
    answers = itertools.cycle([True, False, False])
    found, count = RateSearch(5.0), 0
    while (rate := found.next()) is not None:
        found.tried(rate, next(answers))
        count += 1
        assert count < 50
