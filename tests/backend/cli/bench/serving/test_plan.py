"""From options to a plan and a target."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from inflight.cli.bench.serving.load import Limit
from inflight.cli.bench.serving.plan import plan, target
from inflight.cli.options import LoadOptions, TargetOptions
from inflight.errors import ConfigError
from inflight_client import InvalidRequest


def test_the_defaults_are_a_sweep_of_concurrency_with_a_duration() -> None:
    found = plan(LoadOptions())
    assert (found.kind, found.levels) == ("concurrency", (1, 4, 16, 64))
    assert found.limit == Limit(None, 30.0)
    assert found.workload() == {
        "lengths": "128 input tokens, 64 output tokens",
        "warm-up": "4 requests",
        "seed": "0",
    }


def test_a_number_of_requests_replaces_the_default_duration() -> None:
    assert plan(LoadOptions(requests=50)).limit == Limit(50, None)
    assert plan(LoadOptions(requests=50, duration=2.0)).limit == Limit(50, 2.0)


def test_rates_may_be_fractions() -> None:
    found = plan(LoadOptions(rate="0.5,2", lengths="rag", slo="ttft=5", shared_prefix=64))
    assert (found.kind, found.levels, str(found.slo)) == ("rate", (0.5, 2.0), "ttft=5")
    assert found.workload()["shared prefix"] == "64 tokens"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"concurrency": "1", "rate": "1"}, "--concurrency and --rate are mutually exclusive"),
        ({"concurrency": "0.5"}, "--concurrency: '0.5' is not valid; allowed: whole numbers"),
        ({"concurrency": "1,"}, "--concurrency: '' is not valid"),
        ({"concurrency": "4,4"}, "has a value twice"),
        ({"rate": "0"}, "--rate: '0' is not valid"),
        ({"rate": "inf"}, "--rate: 'inf' is not valid"),
        ({"lengths": "chat", "input_tokens": "5"}, "mutually exclusive"),
        ({"input_tokens": "x"}, "--input-tokens: 'x'"),
        ({"slo": "x=1"}, "--slo"),
        ({"rate": "auto"}, "--rate auto: .*; give --slo"),
        ({"rate": "auto:0", "slo": "ttft=5"}, "--rate: '0' is not valid"),
        ({"rate": "autom", "slo": "ttft=5"}, "--rate: 'autom' .* or auto or auto:FIRST"),
        ({"ramp": 1.0}, "--ramp: a closed loop"),
        ({"scale": 0.0}, "--scale: 0 is not valid"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan(LoadOptions(**options))


def test_a_search_may_have_a_first_rate() -> None:
    found = plan(LoadOptions(rate="auto", slo="ttft=5"))
    assert (found.kind, found.is_search, found.levels) == ("rate", True, ())
    assert plan(LoadOptions(rate="auto:2.5", slo="ttft=5")).levels == (2.5,)
    assert not plan(LoadOptions(rate="2.5")).is_search


def test_a_ramp_is_part_of_the_limit_and_of_the_workload() -> None:
    found = plan(LoadOptions(rate="10", ramp=5.0, requests=100))
    assert found.limit == Limit(100, None, 5.0)
    assert "first 5 s" in found.workload()["not measured"]
    window = found.window(10.0)
    assert window.from_s == 5.0
    times = itertools.takewhile(lambda at: at < window.until_s, found.arrivals(10.0))
    assert sum(window.has(at) for at in times) == 100


def test_lengths_are_scaled() -> None:
    small, large = (plan(LoadOptions(lengths="chat", scale=scale)) for scale in (0.1, 1.0))
    assert small.lengths_name == "chat x 0.1"
    pairs = list(itertools.islice(zip(small.shapes("a"), large.shapes("a"), strict=True), 200))
    for one, ten in pairs:
        assert one.input_len == pytest.approx(ten.input_len / 10, abs=1)
        assert one.output_len == pytest.approx(ten.output_len / 10, abs=1)
        assert min(one.input_len, one.output_len) >= 1


def test_a_target_has_the_defaults_of_its_endpoint() -> None:
    async def urls() -> list[str]:
        found = [target(TargetOptions()), target(TargetOptions(endpoint="openai", model="m"))]
        for one in found:
            await one.aclose()
        return [vars(one).get("url") or vars(one)["_client"].url for one in found]

    assert asyncio.run(urls()) == ["127.0.0.1:8001", "http://127.0.0.1:9000"]
    with pytest.raises(ConfigError, match="--endpoint: 'http' is unknown; allowed: grpc, openai"):
        target(TargetOptions(endpoint="http"))
    with pytest.raises(InvalidRequest, match="not host:port"):
        target(TargetOptions(url="nonsense"))
