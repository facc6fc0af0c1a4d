"""Service level objectives."""

from __future__ import annotations

import pytest

from bench_reports import record
from inflight.cli.bench.serving.results.records import times_of
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
