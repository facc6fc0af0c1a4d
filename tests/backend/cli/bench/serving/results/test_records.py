"""Latencies of one request."""

from __future__ import annotations

import pytest

from bench_reports import record
from inflight.cli.bench.serving.results.records import RequestTimes, gaps_of, times_of


def test_latencies_of_a_request() -> None:
    found = times_of(record(10.0, (10.5, 1), (10.6, 1), (10.9, 1)), started=8.0)
    assert found == RequestTimes(
        sent_s=2.0,
        input_tokens=10,
        output_tokens=3,
        ttft_ms=500.0,
        tpot_ms=200.0,
        gap_ms=300.0,
        e2e_ms=900.0,
    )


def test_tokens_of_the_first_response_do_not_count_for_tpot() -> None:
    """They arrive with the first token, so no time passes for them."""
    found = times_of(record(0.0, (1.0, 4), (1.6, 3)), started=0.0)
    assert found.tpot_ms == pytest.approx(200.0)
    assert found.output_tokens == 7


def test_a_single_response_has_no_time_per_token() -> None:
    found = times_of(record(0.0, (1.0, 4)), started=0.0)
    assert (found.ttft_ms, found.tpot_ms, found.gap_ms) == (1000.0, None, None)


def test_a_request_without_a_token_has_no_ttft() -> None:
    found = times_of(record(0.0, error="Unavailable"), started=0.0)
    assert (found.ttft_ms, found.error) == (None, "Unavailable")


def test_gaps_have_the_tokens_of_the_response_that_ends_them() -> None:
    assert gaps_of([(1.0, 5), (1.5, 2), (2.0, 4)]) == [(0.5, 2), (0.5, 4)]


def test_a_total_alone_is_spread_over_the_responses() -> None:
    one = record(0.0, (1.0, 1), (2.0, 1))
    one.num_output_tokens = 5
    assert one.settled() == [(1.0, 2.5), (2.0, 2.5)]
    one.num_output_tokens = 2
    assert one.settled() == [(1.0, 1.0), (2.0, 1.0)]
