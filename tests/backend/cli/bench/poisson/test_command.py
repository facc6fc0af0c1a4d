"""`inflight bench engine --poisson`, on an engine that only echoes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from inflight.checkpoint.locate import Checkpoint
from inflight.cli.bench.poisson import command
from inflight.cli.bench.serving.plan import plan
from inflight.cli.bench.serving.results.report import Report
from inflight.cli.options import BenchOptions, LoadOptions, PoissonOptions

Run = Callable[..., tuple[int, str, str]]
# Whatever a busy machine does, they are met.
LENIENT = ("--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000")
SHORT = ("--ramp", "0.1", "--scale", "0.05")


@pytest.fixture
def bench(inflight: Run, tiny_llama: Checkpoint) -> Run:
    model = ["--model", str(tiny_llama.path), "--device", "echo", "--set", "num_blocks=4096"]
    return partial(inflight, "bench", "engine", "--poisson", *model, *LENIENT, *SHORT)


def test_each_rate_is_a_level_of_a_table_and_a_page(bench: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, err = bench("--rate", "100,50", "--requests", "20", "--html", str(page))
    assert status == 0, err
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("rate ")][:2] == [
        ["rate", "50/s", "20"],
        ["rate", "100/s", "20"],
    ]
    best = "highest rate that meets p99 of ttft=60000 and tpot=60000 ms: 100/s"
    assert lines[-1].startswith(best)
    assert "rate 50/s: 20 requests" in err
    assert "Goodput over load" in page.read_text()


def test_a_search_prints_a_report_after_each_rate(bench: Run) -> None:
    status, out, _ = bench("--rate", "auto:20", "--requests", "4", "--json")
    assert status == 0
    reports = [msgspec.json.decode(line, type=Report) for line in out.splitlines()]
    assert [len(one.levels) for one in reports] == [1, 2, 3, 4, 5, 6, 7]
    last = reports[-1]
    assert [level.value for level in last.levels] == [20, 40, 80, 160, 320, 640, 1280]
    assert all(level.meets_slo and level.num_completed == 4 for level in last.levels)
    assert last.slo == "ttft=60000,tpot=60000"
    assert last.server["endpoint"] == command.ENDPOINT
    assert last.workload["lengths"] == "chat x 0.05"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--rate", "0"], "--rate: '0' is not valid"),
        (["--slo-ttft-ms", "0"], "--slo: ttft is '0'"),
        (["--lengths", "chats"], "did you mean 'chat'"),
        (["--html", "/nowhere/page.html"], "create it first"),
        (["--scale", "100"], "do not fit the context of 256 tokens"),
        (["--profile", "x"], "--profile and --runs are for rows"),
    ],
)
def test_wrong_options_are_named(bench: Run, arguments: list[str], error: str) -> None:
    status, _, err = bench(*arguments)
    assert status != 0
    assert error in " ".join(err.split())


def test_lengths_may_come_from_a_file_that_has_no_prompts(bench: Run, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_tokens": 200, "output_tokens": 100}\n')
    status, out, _ = bench("--rate", "100", "--requests", "5", "--lengths", str(path))
    assert status == 0
    assert "10/5" in out  # scaled
    path.write_text('{"prompt": "one", "output_tokens": 100}\n')
    status, _, err = bench("--rate", "100", "--lengths", str(path))
    assert status == 1
    assert "lengths.jsonl has prompts" in err and "give input_tokens" in err


def test_options_of_an_open_loop_need_it(inflight: Run) -> None:
    status, _, err = inflight("bench", "engine", "--model", "m", "--rate", "5")
    assert status == 2
    assert "without --poisson" in err


def test_an_engine_and_a_server_get_the_same_requests_at_the_same_times() -> None:
    own = plan(
        command._load(
            BenchOptions(model="m", scale=0.5),
            PoissonOptions(rate="3", requests=50, duration=9.0, ramp=2.0, seed=7),
        )
    )
    served = plan(
        LoadOptions(
            rate="3", requests=50, duration=9.0, ramp=2.0, lengths="chat", scale=0.5, seed=7
        )
    )
    assert own.window(3.0) == served.window(3.0)
    for mine, other in ((own.arrivals(3.0), served.arrivals(3.0)),):
        assert list(itertools.islice(mine, 100)) == list(itertools.islice(other, 100))
    shapes = [list(itertools.islice(one.shapes("rate 3"), 100)) for one in (own, served)]
    assert shapes[0] == shapes[1]
