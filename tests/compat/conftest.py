"""`inflight serve` with the small model, for clients in an environment without inflight."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

START_S = 120.0
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the gateway, without /v1. INFLIGHT is the path of the command."""
    folder = tmp_path_factory.mktemp("server")
    shown = folder / "shown"
    ports = ("http", "grpc", "metrics", "engine-metrics", "gateway")
    with open(shown, "wb") as output:
        process = subprocess.Popen(
            [
                *(os.environ["INFLIGHT"], "serve", "--log-file", str(folder / "log")),
                *(word for port in ports for word in (f"--{port}-port", "0")),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "COLUMNS": "1000"},
        )
    try:
        deadline = time.monotonic() + START_S
        while "READY" not in shown.read_text():
            assert process.poll() is None and time.monotonic() < deadline, shown.read_text()
            time.sleep(0.1)
        time.sleep(0.1)
        match = re.search(r"OpenAI\s+(http://\S+)/v1", shown.read_text())
        assert match is not None
        yield match[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL
