"""From options to a plan and a target."""

from __future__ import annotations

import asyncio
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
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan(LoadOptions(**options))


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
