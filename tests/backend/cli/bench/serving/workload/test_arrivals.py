"""Arrival times of an open loop."""

from __future__ import annotations

import itertools
import math
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


def test_gaps_have_the_distribution_function_of_an_exponential() -> None:
    """Kolmogorov and Smirnov: of 20,000 true ones, 1 sample in 1,000 is further away than 1.95 /
    sqrt(20,000)."""
    found = sorted(gaps(rate=4.0, seed="a"))
    count = len(found)
    distance = max(
        max(abs(expected - index / count), abs(expected - (index + 1) / count))
        for index, expected in enumerate(1 - math.exp(-4.0 * gap) for gap in found)
    )
    assert distance < 1.95 / math.sqrt(count)


def test_numbers_of_arrivals_in_equal_times_vary_as_those_of_a_poisson_process() -> None:
    """Their variance is their mean; regular arrivals would have none."""
    times = itertools.takewhile(lambda at: at < 4000.0, poisson(5.0, "c"))
    counts = [0] * 4000
    for at in times:
        counts[int(at)] += 1
    assert statistics.fmean(counts) == pytest.approx(5.0, rel=0.03)
    # The standard error of the ratio is sqrt(2 / 4000), 2.2 %.
    assert statistics.variance(counts) / statistics.fmean(counts) == pytest.approx(1.0, abs=0.08)


def test_gaps_are_independent_of_each_other() -> None:
    found = gaps(rate=1.0, seed="b")
    assert abs(statistics.correlation(found[:-1], found[1:])) < 0.03


def test_the_same_seed_gives_the_same_times() -> None:
    assert gaps(2.0, "a", 50) == gaps(2.0, "a", 50)
    assert gaps(2.0, "a", 50) != gaps(2.0, "b", 50)
