"""Comparison of two runs."""

from __future__ import annotations

import random
import statistics

import pytest

from bench_reports import random_level, report
from inflight.cli.bench.serving.results.comparison import TOKENS, Difference, compare, interval
from inflight.errors import ConfigError


def by_metric(differences: list[Difference], load: str) -> dict[str, Difference]:
    return {one.metric: one for one in differences if one.load == load}


def test_a_slower_run_is_worse_where_it_is_slower() -> None:
    before, after = random_level(4, itl_s=0.010), random_level(4, itl_s=0.012, seed=1)
    found = by_metric(compare(report(before), report(after)), "concurrency 4")
    assert found["tpot ms"].before == pytest.approx(10, rel=0.02)
    assert found["tpot ms"].share == pytest.approx(0.2, rel=0.1)
    assert found["tpot ms"].verdict == found["e2e ms"].verdict == "worse"
    assert found["ttft ms"].verdict == "same"
    again = by_metric(compare(report(after), report(before)), "concurrency 4")
    assert again["tpot ms"].verdict == "better"


def test_more_tokens_in_a_second_are_better() -> None:
    assert Difference("", TOKENS, 10, 20, 5.0, 15.0).verdict == "better"
    assert Difference("", TOKENS, 20, 10, -15.0, -5.0).verdict == "worse"


def test_an_interval_with_zero_is_no_difference() -> None:
    assert Difference("", "ttft ms", 10, 12, -0.1, 4.0).verdict == "same"


def test_intervals_of_equal_runs_have_zero_about_95_times_in_100() -> None:
    source = random.Random(0)
    misses = 0
    for _ in range(200):
        samples = [[source.expovariate(1.0) for _ in range(80)] for _ in range(2)]
        low, high = interval(*samples)
        misses += not low <= 0 <= high
    # 10 are expected of 200; the percentile interval of a median is somewhat conservative.
    assert 1 <= misses <= 20


def test_the_interval_agrees_with_the_normal_approximation() -> None:
    source = random.Random(1)
    before = [source.gauss(100, 10) for _ in range(400)]
    after = [source.gauss(104, 10) for _ in range(400)]
    low, high = interval(before, after)
    # The standard error of a median of n normal values is 1.253 sigma / sqrt(n).
    error = 1.253 * 10 / 20 * 2**0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.3)
    assert low < statistics.median(after) - statistics.median(before) < high


def test_small_samples_have_no_interval() -> None:
    levels = [random_level(1, 0.01, num_requests=4) for _ in range(2)]
    (one, *_) = compare(report(levels[0]), report(levels[1]))
    assert (one.low, one.high, one.verdict) == (None, None, "unknown")


def test_levels_that_only_one_run_has_are_left_out() -> None:
    one, four, nine = (random_level(value, 0.01) for value in (1, 4, 9))
    found = compare(report(one, four), report(nine, four))
    assert {difference.load for difference in found} == {"concurrency 4"}
    with pytest.raises(ConfigError, match="concurrency 1; concurrency 9"):
        compare(report(one), report(nine))
