"""Figures of a level, on samples whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from bench_reports import measured, record
from inflight.cli.bench.serving.results.figures import cdf, level, summary
from inflight.cli.bench.serving.results.records import GIVEN_UP, UNFINISHED
from inflight.cli.bench.serving.results.slo import parse
from inflight.cli.bench.serving.results.window import Window


def test_a_summary_agrees_with_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=997)
    found = summary(list(values))
    assert found is not None
    assert found.count == 997
    assert found.mean == pytest.approx(values.mean(), abs=1e-4)
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(
        list(np.percentile(values, (50, 90, 95, 99))), abs=1e-4
    )
    assert found.max == pytest.approx(values.max(), abs=1e-4)


def test_weights_count_a_value_several_times() -> None:
    random = np.random.default_rng(1)
    values, weights = random.random(200), random.integers(1, 9, 200)
    expanded = summary(list(np.repeat(values, weights)))
    assert summary(list(values), list(weights)) == expanded
    assert cdf(list(values), list(weights)) == pytest.approx(
        list(np.percentile(np.repeat(values, weights), range(101))), abs=1e-4
    )


def test_an_empty_sample_has_no_summary_and_one_value_is_all_percentiles() -> None:
    assert summary([]) is None
    one = summary([7.0])
    assert one is not None and {one.mean, one.p50, one.p99, one.max} == {7.0}


def test_several_tokens_of_a_response_share_its_gap_in_itl_but_not_in_gap() -> None:
    found = level("concurrency", 1, measured(record(0.0, (1.0, 1), (1.3, 3), (1.4, 1))), None, None)
    # Intervals: 100 ms three times, 100 ms once. Gaps: 300 and 100 ms.
    assert (found.latency_ms["itl"].count, found.latency_ms["itl"].mean) == (4, 100.0)
    assert found.latency_ms["itl"].max == pytest.approx(100.0)
    assert (found.latency_ms["gap"].count, found.latency_ms["gap"].max) == (2, 300.0)
    assert found.tokens_per_response == pytest.approx(5 / 3, abs=1e-3)


def test_the_mean_itl_is_the_mean_tpot_weighted_by_tokens() -> None:
    records = (
        record(0.0, (1.0, 2), (1.5, 5), (2.0, 1)),
        record(0.5, (1.2, 1), (1.3, 1)),
    )
    found = level("concurrency", 2, measured(*records), None, None)
    tpots = [one.tpot_ms or 0.0 for one in found.requests]
    assert found.latency_ms["itl"].mean == pytest.approx((tpots[0] * 6 + tpots[1]) / 7, abs=1e-3)


def test_throughput_counts_what_arrives_in_the_window() -> None:
    records = (
        record(0.0, (1.0, 2), (2.0, 2)),
        record(0.0, (3.0, 4), (5.0, 4)),  # its end is outside
        record(0.0, (6.0, 8)),  # all of it is
    )
    found = level("concurrency", 3, measured(*records, window_s=4.0), None, 3.6)
    assert found.throughput.output_tokens_per_s == 8 / 4
    assert found.throughput.input_tokens_per_s == 20 / 4
    assert found.throughput.tokens_per_s == 28 / 4
    assert found.throughput.requests_per_s == 1 / 4
    assert found.num_completed == 3
    assert found.tokens_each_s == [0, 2, 2, 4]
    # 3.6 per hour is 0.001 per second: 2 tokens.
    assert found.cost == {"output": 500.0, "total": pytest.approx(142.8571)}


def test_errors_are_counted_by_kind_and_unfinished_requests_are_none() -> None:
    records = (
        record(0.0, (1.0, 1)),
        record(0.0, error="Unavailable"),
        record(0.0, error="Unavailable"),
        record(0.0, (0.5, 1), error="ServerError"),
        record(0.0, (0.9, 1), error=UNFINISHED),
    )
    found = level("concurrency", 5, measured(*records), None, None)
    assert (found.num_requests, found.num_completed, found.num_failed) == (5, 1, 3)
    assert found.errors == {"Unavailable": 2, "ServerError": 1}
    assert found.error_examples["Unavailable"] == "what Unavailable says"
    # Their tokens were served, their latencies are not those of a request.
    assert found.throughput.output_tokens_per_s == 3.0
    assert found.latency_ms["ttft"].count == 1


def test_goodput_counts_requests_that_meet_the_slo() -> None:
    records = (
        record(0.0, (0.1, 1), (0.2, 1)),
        record(0.0, (0.1, 1), (0.9, 1)),  # ITL
        record(0.0, (0.6, 1), (0.7, 1)),  # TTFT
        record(0.0, error="Unavailable"),
        record(1.0, (1.1, 1), (1.5, 1)),
    )
    found = level("rate", 5, measured(*records, window_s=2.0), parse("ttft=500,itl=500"), None)
    assert (found.goodput_per_s, found.slo_share) == (2 / 2.0, 2 / 5)


def test_a_level_without_an_answer_has_no_latency() -> None:
    found = level("rate", 1, measured(record(0.0, error="Unavailable")), parse("e2e=1"), 1.0)
    assert (found.latency_ms, found.cdf_ms, found.cost) == ({}, {}, None)
    assert (found.goodput_per_s, found.input_tokens) == (0.0, None)


def test_the_load_of_the_client_is_reported() -> None:
    found = level("rate", 1, measured(record(0.0, (1.0, 1)), lag_ms=7.5), None, None)
    assert found.client.lag_ms.p99 == 7.5
    assert found.client.cpu_share == 0.25


def test_latencies_of_an_open_loop_count_from_the_due_time() -> None:
    """Sent 2 s late, the request still made its user wait for 2.5 s."""
    found = level("rate", 1, measured(record(3.0, (3.5, 1), (3.6, 1), due=1.0)), None, None)
    assert found.requests[0].sent_s == 1.0
    assert found.latency_ms["ttft"].p50 == 2500.0
    assert found.latency_ms["e2e"].p50 == pytest.approx(2600.0)
    assert found.latency_ms["tpot"].p50 == pytest.approx(100.0)


def test_requests_due_outside_the_window_are_load_and_not_measured() -> None:
    records = (
        record(0.5, (1.0, 1), (2.5, 3), due=0.5),  # before; its last tokens arrive in the window
        record(2.0, (2.5, 1), (3.5, 1), due=2.0),
        record(3.9, (4.5, 1), (5.0, 7), due=3.9),  # ends after the window
        record(4.1, (4.2, 1), due=4.1),  # after
    )
    slo = parse("ttft=550,tpot=1000")
    found = level("rate", 1, measured(*records, window=Window(2.0, 4.0)), slo, None)
    assert (found.num_requests, found.num_completed, found.ramp_s) == (2, 2, 2.0)
    assert [one.sent_s for one in found.requests] == [2.0, 3.9]
    # Tokens in the window, whosever: 3 + 1 + 1.
    assert found.throughput.output_tokens_per_s == 5 / 2
    assert found.tokens_each_s == [4, 1]
    # Of the requests that were due in the window, with the end of one outside; 600 ms is too late.
    assert (found.goodput_per_s, found.slo_share) == (1 / 2, 1 / 2)
    assert found.meets_slo is False


def test_latencies_of_a_request_that_was_given_up_are_those_until_then() -> None:
    waiting = record(2.0, error=GIVEN_UP, due=2.0)
    slow = record(2.5, (3.0, 1), (3.5, 1), error=GIVEN_UP, due=2.5)
    begun = record(2.5, (4.0, 1), error=GIVEN_UP, due=2.5)
    for one in (waiting, slow, begun):
        one.ended = 9.0
    run = measured(waiting, slow, begun, window=Window(1.0, 3.0))
    found = level("rate", 1, run, parse("ttft=500,tpot=100"), None)
    assert (found.num_completed, found.errors) == (0, {GIVEN_UP: 3})
    assert [one.ttft_ms for one in found.requests] == [7000.0, 500.0, 1500.0]
    assert [one.tpot_ms for one in found.requests] == [None, 6000.0, 5000.0]
    assert (found.goodput_per_s, found.meets_slo) == (0.0, False)


def test_percentiles_of_a_level_agree_with_numpy() -> None:
    source = np.random.default_rng(3)
    records = []
    for due in np.cumsum(source.exponential(0.01, 1000)):
        gaps = source.lognormal(-3, 1, 5)
        times = due + np.cumsum(gaps)
        records.append(record(due, *((at, 1) for at in times), due=float(due)))
    found = level("rate", 100, measured(*records), None, None)
    samples = {
        "ttft": [one.arrivals[0][0] - one.began for one in records],
        "tpot": [(one.arrivals[-1][0] - one.arrivals[0][0]) / 4 for one in records],
        "itl": np.concatenate([np.diff([at for at, _ in one.arrivals]) for one in records]),
        "e2e": [one.ended - one.began for one in records],
    }
    for name, sample in samples.items():
        summary_ = found.latency_ms[name]
        assert [summary_.p50, summary_.p95, summary_.p99] == pytest.approx(
            list(np.percentile(np.asarray(sample) * 1e3, (50, 95, 99))), abs=1e-3
        )


def test_late_requests_are_counted() -> None:
    late_s = [0.0, 0.004, 0.006, 0.2]
    client = level("rate", 1, measured(record(0.0), late_s=late_s), None, None).client
    assert client.late_ms is not None
    assert (client.num_late, client.late_ms.count, client.late_ms.max) == (2, 4, 200.0)
