"""The levels of a plan."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fake_target import FakeTarget
from inflight.cli.bench.serving.plan import plan
from inflight.cli.bench.serving.results.report import Level
from inflight.cli.bench.serving.runner import Runner
from inflight.cli.bench.serving.show import Show
from inflight.cli.options import LoadOptions
from inflight.errors import ConfigError
from inflight_client import Unavailable


def run(target: FakeTarget, stop_at: int | None = None, **options: Any) -> list[Level]:
    """stop_at: stops once so many prompts were sent."""

    async def levels() -> list[Level]:
        stop = asyncio.Event()

        async def stop_in_time(number: int) -> None:
            while len(target.prompts) < number:
                await asyncio.sleep(0.001)
            stop.set()

        stopping = asyncio.create_task(stop_in_time(stop_at)) if stop_at is not None else None
        show = Show(Console(file=io.StringIO()), Console(file=io.StringIO()))
        runner = Runner(target, plan(LoadOptions(**options)), show, stop)
        await runner.run()
        if stopping is not None:
            await stopping
        return runner.levels

    return asyncio.run(levels())


def sent(target: FakeTarget, count: int) -> list[str]:
    """The last prompts, without those that count words and warm up."""
    return [prompt.text for prompt in target.prompts[-count:]]


def test_each_level_is_measured_with_prompts_of_the_wanted_lengths() -> None:
    levels = run(
        FakeTarget(), concurrency="1,3", requests=12, input_tokens="50:10", output_tokens="4"
    )
    assert [(one.name, one.num_completed) for one in levels] == [
        ("concurrency 1", 12),
        ("concurrency 3", 12),
    ]
    assert all(one.output_tokens is not None and one.output_tokens.max == 4 for one in levels)
    found = levels[0].input_tokens
    assert found is not None and 40 < found.mean < 60 and found.max > found.p50


def test_the_same_seed_gives_the_same_lengths_and_other_words() -> None:
    targets = [FakeTarget(), FakeTarget()]
    options = {"concurrency": "2", "requests": 20, "input_tokens": "40:9", "output_tokens": "9:3"}
    levels = [run(target, seed=7, **options)[0] for target in targets]
    shapes = [sorted((r.input_tokens, r.output_tokens) for r in one.requests) for one in levels]
    assert shapes[0] == shapes[1]
    prompts = [set(sent(target, 20)) for target in targets]
    assert len(prompts[0]) == len(prompts[1]) == 20
    assert not prompts[0] & prompts[1]
    again = run(FakeTarget(), seed=8, **options)[0]
    assert sorted((r.input_tokens, r.output_tokens) for r in again.requests) != shapes[0]


def test_rates_are_open_loops() -> None:
    target = FakeTarget(ttft_s=0.3)
    (found,) = run(target, rate="200", requests=30, output_tokens="1")
    assert (found.name, found.num_completed) == ("rate 200/s", 30)
    assert found.client.late_ms is not None and found.client.late_ms.count == 30
    assert target.max_in_flight > 10


def test_a_search_ends_when_no_rate_misses_the_slo() -> None:
    found = run(
        FakeTarget(), rate="auto:20", slo="e2e=60000", requests=5, ramp=0.05, output_tokens="1"
    )
    assert [one.value for one in found] == [20, 40, 80, 160, 320, 640, 1280]
    assert all(one.meets_slo and one.num_completed == 5 for one in found)


def test_prompts_of_a_file_are_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one", "output_tokens": 2}\n{"prompt": "two", "output_tokens": 3}\n'
    )
    target = FakeTarget()
    run(target, lengths=str(path), concurrency="1", requests=3, warmup=0)
    assert [(one.text, one.output_len) for one in target.prompts] == [
        ("one", 2),
        ("two", 3),
        ("one", 2),
    ]
    with pytest.raises(ConfigError, match="--shared-prefix"):
        run(FakeTarget(), lengths=str(path), shared_prefix=16)


def test_warm_up_requests_are_not_measured() -> None:
    targets = [FakeTarget(), FakeTarget()]
    levels = [
        run(target, concurrency="1", requests=2, warmup=warmup)
        for target, warmup in zip(targets, (0, 5), strict=True)
    ]
    assert [one.num_requests for (one,) in levels] == [2, 2]
    assert len(targets[1].prompts) - len(targets[0].prompts) == 5


def test_prompts_shorter_than_what_all_have_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--input-tokens: 4 tokens are too few; .* least 5,"):
        run(FakeTarget(), input_tokens="4", requests=1)
    with pytest.raises(ConfigError, match="at least 65, since"):
        run(FakeTarget(), input_tokens="64", requests=1, shared_prefix=64)
    (found,) = run(FakeTarget(), input_tokens="65", requests=1, shared_prefix=64, concurrency="1")
    assert found.input_tokens is not None and found.input_tokens.p50 == 65


def test_lengths_that_never_fit_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit the context of 100 tokens"):
        run(FakeTarget(), input_tokens="90", output_tokens="11", max_model_len=100)


def test_a_stopped_run_keeps_what_was_measured() -> None:
    found = run(FakeTarget(ttft_s=0.01), stop_at=30, concurrency="1,2", duration=300.0, warmup=1)
    assert [one.name for one in found] == ["concurrency 1"]
    assert found[0].is_interrupted and found[0].num_completed > 0
    assert found[0].num_completed < found[0].num_requests


def test_a_server_that_refuses_prompts_ends_the_run() -> None:
    with pytest.raises(Unavailable, match="full"):
        run(FakeTarget(errors=[Unavailable("full")]))


def test_a_run_that_is_stopped_while_it_counts_words_has_no_level() -> None:
    assert run(FakeTarget(ttft_s=300.0), stop_at=1) == []
