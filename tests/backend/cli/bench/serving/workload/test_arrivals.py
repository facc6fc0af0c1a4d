"""Arrival times of an open loop."""

from __future__ import annotations

import itertools
import statistics

import pytest

from inflight.cli.bench.serving.workload.arrivals import poisson


def gaps(rate: float, seed: str, count: int = 20_000) -> list[float]:
    times = [0.0, *itertools.islice(poisson(rate, seed), count)]
    return [after - before for before, after in itertools.pairwise(times)]


def test_gaps_are_exponential_with_the_mean_of_the_rate() -> None:
    found = gaps(rate=4.0, seed="a")
    # Of 20,000 gaps, the standard error of the mean is 0.7 %. An exponential distribution has a
    # deviation equal to its mean, and 63.2 % of it lie below the mean.
    assert statistics.fmean(found) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(found) == pytest.approx(0.25, rel=0.04)
    below = sum(gap < 0.25 for gap in found) / len(found)
    assert below == pytest.approx(0.632, abs=0.015)


def test_gaps_are_independent_of_each_other() -> None:
    found = gaps(rate=1.0, seed="b")
    assert abs(statistics.correlation(found[:-1], found[1:])) < 0.03


def test_the_same_seed_gives_the_same_times() -> None:
    assert gaps(2.0, "a", 50) == gaps(2.0, "a", 50)
    assert gaps(2.0, "a", 50) != gaps(2.0, "b", 50)
