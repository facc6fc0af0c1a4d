"""Triton's perf_analyzer runs against the server without errors."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import perf_analyzer
from failpoint import failpoint
from inflight.engine.stats import Stats
from supervised import Serving, serve

STREAMS = 32
REQUESTS = 64
WINDOW = 24  # of three, at least, that the tool needs to find a throughput stable
OUTPUT_LEN = 16
# Tokens come one by one, as a model's.
STEP_MS = 20

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with (
        failpoint("slow", STEP_MS),
        serve(tmp_path_factory.mktemp("perf-analyzer"), "echo") as found,
    ):
        yield found


def test_32_streams_of_text(serving: Serving, tmp_path: Path):
    prompts = [
        {
            "text_input": [f"Tell me a story about {what}."],
            "max_tokens": [OUTPUT_LEN],
            "ignore_eos": [True],
            "stream": [True],
        }
        for what in ("a lighthouse", "seven ducks", "the last train", "rain")
    ]
    data, export = tmp_path / "prompts.json", tmp_path / "profile.json"
    data.write_text(json.dumps({"data": prompts}))
    perf_analyzer.run(
        f"""
        -m generate -u {serving.grpc} -i grpc --streaming --async --concurrency-range {STREAMS}
        --measurement-mode count_windows --measurement-request-count {WINDOW}
        --max-trials 4 --stability-percentage 999
        """,
        data,
        *("--profile-export-file", str(export)),
    )
    # The export holds outputs as raw bytes.
    profile = json.loads(export.read_text(encoding="latin-1"))
    requests = profile["experiments"][0]["requests"]
    assert len(requests) >= REQUESTS
    # The last response is Triton's empty final one; the server may have put tokens together.
    assert all(2 <= len(r["response_timestamps"]) <= OUTPUT_LEN + 1 for r in requests)
    serving.wait_until(lambda: is_idle(serving.stats()))


def is_idle(stats: Stats) -> bool:
    num_unfinished = stats.num_running + stats.num_waiting + stats.num_suspended
    return num_unfinished == 0 and stats.num_free_blocks == stats.num_blocks


def num_inferences(address: str, model: str) -> int:
    with urllib.request.urlopen(f"http://{address}/v2/models/{model}/stats", timeout=60) as answer:
        return int(json.load(answer)["model_stats"][0]["inference_count"])


def test_a_lost_stub_ends_the_run_with_an_error_for_each_worker(
    serving: Serving, tmp_path: Path
) -> None:
    """Over HTTP: the tool waits for ever for the responses of a gRPC stream that has ended."""
    data = tmp_path / "prompts.json"
    data.write_text(json.dumps({"data": [{"text_input": ["Tell me a story."]}]}))
    load = """
        -m tokenizer -u {} -i http --concurrency-range 8 --measurement-mode count_windows
        --measurement-request-count {} --max-trials 4 --stability-percentage 999
    """
    with ThreadPoolExecutor(1) as pool:
        tokenizer = serving.pid_of("tokenizer")
        running = pool.submit(perf_analyzer.execute, load.format(serving.http, 100_000), data)
        serving.wait_until(lambda: num_inferences(serving.http, "tokenizer") > 500)
        with serving.restarting("tritonserver"):
            os.kill(tokenizer, signal.SIGKILL)
            ended = running.result(120)
            assert ended.returncode != 0
            errors = [line for line in ended.stderr.splitlines() if " had error: " in line]
            assert len(errors) == 8, ended.stderr
        assert serving.pid_of("tokenizer") != tokenizer
        perf_analyzer.run(load.format(serving.http, REQUESTS), data)
