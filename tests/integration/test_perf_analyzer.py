"""Triton's perf_analyzer runs against the server without errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import perf_analyzer
from serving import Triton

STREAMS = 32
REQUESTS = 64
OUTPUT_LEN = 16

pytestmark = pytest.mark.integration


@pytest.fixture(scope="session")
def command() -> tuple[list[str], dict[str, str]]:
    return perf_analyzer.find_or_fetch()


def test_32_streams_of_text(cpu: Triton, command, tmp_path: Path):
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
    program, environment = command
    arguments = f"""
        -m generate -u {cpu.grpc} -i grpc --streaming --async --concurrency-range {STREAMS}
        --measurement-mode count_windows --measurement-request-count {REQUESTS}
        --max-trials 4 --stability-percentage 999
    """
    done = subprocess.run(
        [
            *program,
            *arguments.split(),
            *("--input-data", str(data)),
            *("--profile-export-file", str(export)),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Throughput:" in output, output
    for word in ("failed", "error", "Failed", "Error"):
        assert word not in output, output
    # The export holds outputs as raw bytes.
    profile = json.loads(export.read_text(encoding="latin-1"))
    requests = profile["experiments"][0]["requests"]
    assert len(requests) >= REQUESTS
    # The last response is Triton's empty final one; the model may have put tokens together.
    assert all(2 <= len(r["response_timestamps"]) <= OUTPUT_LEN + 1 for r in requests)
    cpu.wait_until_idle()
