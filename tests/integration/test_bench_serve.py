"""`inflight bench serve` against a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inflight.cli.bench.serving.results.report import Report, read
from serving import Triton

COMMAND = [sys.executable, "-m", "inflight.cli.app", "bench", "serve"]

pytestmark = pytest.mark.integration


def bench(path: Path, *arguments: str) -> Report:
    done = subprocess.run(
        [*COMMAND, "--json", str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return read(path)


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_prompts_and_outputs_have_the_wanted_lengths(
    echo: Triton, tmp_path: Path, chat: tuple[str, ...]
) -> None:
    found = bench(
        tmp_path / "run.json",
        *("--url", echo.grpc, "--concurrency", "1,4", "--requests", "12", *chat),
        *("--input-tokens", "100", "--output-tokens", "24"),
    )
    for level in found.levels:
        assert level.num_completed == 12, level.error_examples
        assert {(one.input_tokens, one.output_tokens) for one in level.requests} == {(100, 24)}
    assert found.server["serves"] == "SmolLM2-135M-Instruct"
    assert int(found.server["max_model_len"]) > 1000
    echo.wait_until_idle()


def test_no_prompt_is_found_in_the_prefix_cache_unless_it_is_shared(
    echo: Triton, tmp_path: Path
) -> None:
    def cached(num_requests: int, *arguments: str) -> int:
        before = echo.stats().num_cached_tokens
        bench(
            tmp_path / "run.json",
            *("--url", echo.grpc, "--concurrency", "2", "--requests", str(num_requests)),
            *("--input-tokens", "128", "--output-tokens", "4", "--warmup", "0", *arguments),
        )
        return echo.stats().num_cached_tokens - before

    cached(2)
    # Prompts that count words are the same in all runs.
    of_counting = cached(2)
    assert cached(12) == of_counting
    # All but the first one, or two that run side by side, find most of the 96 tokens.
    assert cached(12, "--shared-prefix", "96") >= of_counting + 10 * 80


def test_an_open_loop(echo: Triton, tmp_path: Path) -> None:
    found = bench(
        tmp_path / "run.json",
        *("--url", echo.grpc, "--rate", "20", "--duration", "2", "--output-tokens", "8"),
        *("--seed", "1"),
    )
    (level,) = found.levels
    assert level.num_failed == 0
    # 40 are expected; 99.99 % of Poisson counts lie between these.
    assert 18 <= level.num_requests <= 67
    echo.wait_until_idle()
