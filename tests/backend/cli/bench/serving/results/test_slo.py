"""Service level objectives."""

from __future__ import annotations

import math

import pytest

from bench_reports import record
from inflight.cli.bench.serving.results.records import GIVEN_UP, RequestTimes, times_of
from inflight.cli.bench.serving.results.slo import Slo, parse
from inflight.errors import ConfigError

TIMES = times_of(record(0.0, (0.5, 1), (0.52, 1), (0.58, 1)), started=0.0)


@pytest.mark.parametrize(
    ("text", "is_met"),
    [
        ("ttft=500", True),
        ("ttft=499", False),
        ("itl=40", True),
        ("itl=39.9", False),
        ("tpot=39.9", False),
        ("gap=60", True),
        ("gap=59", False),
        ("e2e=580", True),
        ("ttft=500, itl=40,e2e=100", False),
    ],
)
def test_a_request_meets_all_bounds_or_fails(text: str, is_met: bool) -> None:
    assert parse(text).is_met(TIMES) == is_met


def test_a_failed_request_meets_no_bound() -> None:
    failed = times_of(record(0.0, (0.1, 1), error="ServerError"), started=0.0)
    assert not parse("ttft=500").is_met(failed)


def test_an_output_of_one_response_meets_bounds_on_itl() -> None:
    short = times_of(record(0.0, (0.1, 3)), started=0.0)
    assert parse("itl=1,gap=1").is_met(short)


def times(*ttfts_ms: float, error: str = "") -> list[RequestTimes]:
    return [
        times_of(record(0.0, (ttft / 1e3, 1), (ttft / 1e3 + 0.02, 1), error=error), started=0.0)
        for ttft in ttfts_ms
    ]


def test_the_99th_percentile_decides_about_a_level() -> None:
    """One of 101 requests may be slow, two may not."""
    slo = parse("ttft=500,tpot=30")
    assert slo.is_met_at_p99(times(*[100] * 100, 9000))
    assert not slo.is_met_at_p99(times(*[100] * 99, 9000, 9000))
    assert not slo.is_met_at_p99(times(*[501] * 100))
    assert not parse("tpot=19").is_met_at_p99(times(*[100] * 100))


def test_one_request_that_was_given_up_in_101_does_not_decide() -> None:
    slo = parse("ttft=500,tpot=30")
    given_up = record(0.0, (0.1, 1), error=GIVEN_UP)
    given_up.ended = 90.0
    missed = times_of(given_up, started=0.0)
    assert not slo.is_met(missed)
    assert slo.is_met_at_p99([*times(*[100] * 100), missed])
    assert not slo.is_met_at_p99([*times(*[100] * 50), missed, missed])


def test_a_failed_request_and_a_level_without_requests_miss_the_slo() -> None:
    slo = parse("ttft=500")
    assert not slo.is_met_at_p99([*times(*[100] * 1000), *times(100, error="Unavailable")])
    assert not slo.is_met_at_p99([])


def test_a_request_is_given_up_when_it_has_missed_a_bound() -> None:
    assert parse("ttft=500,tpot=30").patience_s(11) == pytest.approx(0.8)
    assert parse("ttft=500,itl=30").patience_s(1) == 0.5
    assert parse("ttft=500,tpot=30,e2e=600").patience_s(11) == 0.6
    # Its first token may have come in time, and the others may take forever.
    assert parse("ttft=500").patience_s(11) == math.inf
    assert parse("tpot=30").patience_s(11) == math.inf


def test_it_reads_as_given() -> None:
    assert str(parse("ttft=500,itl=50")) == "ttft=500,itl=50"
    assert parse("ttft=1,ttft=2") == Slo((("ttft", 2.0),))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tft=5", "did you mean 'ttft'"),
        ("ttft=0", "above 0"),
        ("ttft=nan", "above 0"),
        ("ttft=x", "above 0"),
        ("ttft", "above 0"),
        ("", "is unknown"),
    ],
)
def test_a_wrong_bound_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(text)
