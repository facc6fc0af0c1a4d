"""Histograms as arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.metrics.histogram import Histogram

BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 5))))
def test_counts_and_sum_are_those_of_the_values(observations):
    histogram = Histogram(BOUNDS)
    values = []
    for value, times in observations:
        histogram.observe(value, times)
        values += [value] * times
    cumulative = [sum(histogram.counts[: index + 1]) for index in range(len(BOUNDS))]
    assert cumulative == [sum(value <= bound for value in values) for bound in BOUNDS]
    assert sum(histogram.counts) == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_bounds_are_inclusive():
    histogram = Histogram(BOUNDS)
    histogram.observe(1.0)
    assert histogram.counts == [0, 1, 0, 0]
