"""Programs that measure servers: as many requests and tokens as they were told, without errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import perf_analyzer_260
import pytest
from conftest import Server

REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 6, 24, 8
BIN = Path(sys.executable).parent
TIMEOUT_S = 240


def run(folder: Path, *words: str, **environment: str) -> None:
    """A program of this environment, in a folder; it must succeed."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def only(folder: Path, pattern: str) -> Any:
    (path,) = folder.rglob(pattern)
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.client("aiperf", route, package="aiperf"), id=kind)
        for kind, route in (("chat", "/v1/chat/completions"), ("completions", "/v1/completions"))
    ],
)
def test_aiperf(url: str, model: str, tokenizer: Path, tmp_path: Path, kind: str) -> None:
    run(
        tmp_path,
        *("aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", kind),
        *("--streaming", "--tokenizer", str(tokenizer), "--concurrency", "2", "--ui", "none"),
        *("--request-count", str(REQUESTS), "--extra-inputs", "ignore_eos:true"),
        *("--synthetic-input-tokens-mean", str(INPUT_TOKENS)),
        *("--output-tokens-mean", str(OUTPUT_TOKENS)),
    )
    found = only(tmp_path, "profile_export_aiperf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] == pytest.approx(OUTPUT_TOKENS, abs=1)


@pytest.mark.parametrize(
    ("layout", "name", "backend"),
    [
        pytest.param(
            *(layout, name, backend),
            marks=pytest.mark.client(
                f"genai-perf, {backend}", f"{layout}, {name}", package="genai-perf"
            ),
            id=name,
        )
        for layout, name, backend in (
            ("native", "generate", "vllm"),
            ("vllm", "vllm_model", "vllm"),
            ("tensorrtllm", "ensemble", "tensorrtllm"),
        )
    ],
)
def test_genai_perf(
    request: pytest.FixtureRequest, tokenizer: Path, layout: str, name: str, backend: str
) -> None:
    server: Server = request.getfixturevalue(layout)
    folder: Path = request.getfixturevalue("tmp_path")
    programs = perf_analyzer_260.folder()
    run(
        folder,
        *("genai-perf", "profile", "-m", name, "--tokenizer", str(tokenizer)),
        *("--endpoint-type", "kserve", "--backend", backend, "--url", server.grpc, "--streaming"),
        *("--concurrency", "2", "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(INPUT_TOKENS)),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-mean-deterministic"),
        PATH=f"{programs}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
        HF_HUB_OFFLINE="1",
    )
    found = only(folder, "*_genai_perf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] == pytest.approx(OUTPUT_TOKENS, abs=1)


@pytest.mark.client("guidellm", "/v1/chat/completions", package="guidellm")
def test_guidellm(url: str, tokenizer: Path, tmp_path: Path) -> None:
    run(
        tmp_path,
        *("guidellm", "run", "--backend", f"kind=openai_http,target={url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
    )
    (benchmark,) = only(tmp_path, "benchmarks.json")["benchmarks"]
    found = benchmark["requests"]
    assert (len(found["successful"]), len(found["errored"])) == (REQUESTS, 0)
    assert all(one["output_tokens"] == OUTPUT_TOKENS for one in found["successful"])


@pytest.mark.parametrize(
    ("backend", "route"),
    [
        pytest.param(
            *(backend, route),
            marks=pytest.mark.client("vllm bench serve", route, package="vllm"),
            id=backend,
        )
        for backend, route in (
            ("openai", "/v1/completions"),
            ("openai-chat", "/v1/chat/completions"),
        )
    ],
)
def test_vllm_bench_serve(
    url: str, model: str, tokenizer: Path, tmp_path: Path, backend: str, route: str
) -> None:
    run(
        tmp_path,
        *("vllm", "bench", "serve", "--backend", backend, "--base-url", url, "--endpoint", route),
        *("--model", model, "--tokenizer", str(tokenizer), "--dataset-name", "random"),
        *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "2", "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path)),
    )
    found = only(tmp_path, f"{backend}-*.json")
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
