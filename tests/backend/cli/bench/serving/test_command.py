"""`inflight bench serve` as its users run it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_openai
import fake_triton
from bench_reports import measured, random_level, record, report
from fake_openai import DONE, event
from fake_triton import Call, answer
from inflight.cli.bench.serving.command import exit_status
from inflight.cli.bench.serving.results import figures
from inflight.cli.bench.serving.results.records import GIVEN_UP, Record
from inflight.cli.bench.serving.results.report import Level, read, write
from inflight.cli.bench.serving.results.slo import parse

COMMAND = [sys.executable, "-m", "inflight.cli.app", "bench", "serve"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def words(text: str) -> int:
    return len(text.split())


def triton(call: Call) -> Iterator[Any]:
    """One token per response, and a token per word of the prompt."""
    prompt = call.input("text_input")[2][4:].decode()
    count = int.from_bytes(call.input("max_tokens")[2], "little")
    for index in range(count):
        reason = "length" if index == count - 1 else ""
        yield answer("a", reason, num_input=words(prompt))


def openai(body: dict[str, Any]) -> Iterator[bytes]:
    for index in range(body["max_tokens"]):
        usage = {"prompt_tokens": words(body["prompt"]), "completion_tokens": index + 1}
        yield event({"choices": [{"text": "a"}], "usage": usage})
    yield DONE


def test_a_level_without_an_answer_is_a_failure_and_one_beyond_the_slo_is_not() -> None:
    def of(*records: Record) -> Level:
        return figures.level("rate", 1, measured(*records), parse("ttft=500"), None)

    good, given_up = of(record(0.0, (0.1, 1))), of(record(0.0, error=GIVEN_UP))
    assert exit_status([good, given_up]) == 0
    assert exit_status([good, of(record(0.0, error="Unavailable"))]) == 1


def test_a_run_over_grpc_writes_a_table_json_and_a_page(tmp_path: Path) -> None:
    to_json, to_html = tmp_path / "run.json", tmp_path / "run.html"
    with fake_triton.serve(triton) as server:
        done = bench(
            *("--url", server.url, "--concurrency", "1,2", "--requests", "10", "--warmup", "2"),
            *("--input-tokens", "32", "--output-tokens", "5", "--slo", "e2e=60000"),
            *("--json", str(to_json), "--html", str(to_html), "--api-key", "k-secret"),
        )
    assert done.returncode == 0, done.stderr
    found = read(to_json)
    assert [level.name for level in found.levels] == ["concurrency 1", "concurrency 2"]
    for level in found.levels:
        assert (level.num_completed, level.slo_share) == (10, 1.0)
        assert {(one.input_tokens, one.output_tokens) for one in level.requests} == {(32, 5)}
    assert '--api-key "$INFLIGHT_API_KEY"' in found.command
    assert "k-secret" not in to_json.read_text() + to_html.read_text() + done.stdout
    assert "goodput/s" in done.stdout
    assert "concurrency 2: 10 requests" in done.stderr


def test_a_run_over_openai(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with fake_openai.serve(openai) as server:
        done = bench(
            *("--endpoint", "openai", "--url", server.url, "--rate", "100", "--requests", "20"),
            *("--input-tokens", "16", "--output-tokens", "4", "--json", str(path)),
        )
    assert done.returncode == 0, done.stderr
    (level,) = read(path).levels
    assert (level.name, level.num_completed) == ("rate 100/s", 20)
    assert {(one.input_tokens, one.output_tokens) for one in level.requests} == {(16, 4)}
    assert read(path).server["model"] == "fake-1"


def test_ctrl_c_reports_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def slow(call: Call) -> Iterator[Any]:
        time.sleep(0.05)
        yield from triton(call)

    with fake_triton.serve(slow) as server:
        command = ["--url", server.url, "--concurrency", "1,2", "--duration", "60"]
        with subprocess.Popen(
            [*COMMAND, *command, "--json", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("concurrency 1: 60 s"):
                    break
            num_before = len(server.calls)
            while len(server.calls) < num_before + 5:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopping: Ctrl-C again stops at once" in err
    (level,) = read(path).levels
    assert level.is_interrupted and level.num_completed >= 3
    assert "concurrency 1 (interrupted)" in out


def test_a_level_without_a_completed_request_is_a_failure(tmp_path: Path) -> None:
    def full(call: Call) -> Iterator[Any]:
        if int.from_bytes(call.input("max_tokens")[2], "little") == 1:
            yield from triton(call)  # counting words
        else:
            import grpc

            call.context.abort(grpc.StatusCode.UNAVAILABLE, "the queue is full")

    with fake_triton.serve(full) as server:
        done = bench("--url", server.url, "--concurrency", "1", "--requests", "3", "--warmup", "0")
    assert done.returncode == 1
    assert "3 x Unavailable: the queue is full" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--url", "127.0.0.1:1"), "error: "),
        (("--rate", "x"), "error: --rate: 'x' is not valid"),
        (("--json", "/nowhere/a.json"), "error: /nowhere/a.json: its folder does not exist"),
        (("--compare", "/nowhere/a", "/nowhere/b"), "error: /nowhere/a cannot be read"),
    ],
)
def test_a_wrong_command_is_a_plain_error(arguments: tuple[str, ...], error: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(error)
    assert "Traceback" not in done.stderr


def test_two_runs_are_compared(tmp_path: Path) -> None:
    for name, itl_s in (("before", 0.01), ("after", 0.02)):
        write(report(random_level(4, itl_s)), tmp_path / f"{name}.json")
    page = tmp_path / "page.html"
    files = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
    done = bench("--compare", *files, "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "tpot ms" in done.stdout and "worse" in done.stdout
    assert "Comparison of two load tests" in page.read_text()


def test_json_is_for_programs(tmp_path: Path) -> None:
    """Without our package: plain keys and numbers."""
    path = tmp_path / "run.json"
    write(report(random_level(4, 0.01)), path)
    (level,) = json.loads(path.read_text())["levels"]
    assert level["latency_ms"]["ttft"]["p99"] > level["latency_ms"]["ttft"]["p50"] > 0
    assert level["requests"][0]["output_tokens"] == 21
