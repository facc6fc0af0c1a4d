"""Triton's perf_analyzer runs against the server without errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import perf_analyzer
from serving import Triton

STREAMS = 32
REQUESTS = 64
OUTPUT_LEN = 16

pytestmark = pytest.mark.integration


def test_32_streams_of_text(cpu: Triton, tmp_path: Path):
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
        -m generate -u {cpu.grpc} -i grpc --streaming --async --concurrency-range {STREAMS}
        --measurement-mode count_windows --measurement-request-count {REQUESTS}
        --max-trials 4 --stability-percentage 999
        """,
        data,
        *("--profile-export-file", str(export)),
    )
    # The export holds outputs as raw bytes.
    profile = json.loads(export.read_text(encoding="latin-1"))
    requests = profile["experiments"][0]["requests"]
    assert len(requests) >= REQUESTS
    # The last response is Triton's empty final one; the model may have put tokens together.
    assert all(2 <= len(r["response_timestamps"]) <= OUTPUT_LEN + 1 for r in requests)
    cpu.wait_until_idle()
