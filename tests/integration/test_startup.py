"""Time until a server is ready, by the documented command, from a cold start."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.alone]

READY_S = 15.0
FIRST_TOKEN_S = 1.0
INFLIGHT = Path(sys.executable).parent / "inflight"


class Serve:
    """`inflight serve` on free ports, and what it prints."""

    def __init__(self) -> None:
        ports = [
            "--http-port",
            "0",
            "--grpc-port",
            "0",
            "--metrics-port",
            "0",
            "--gateway-port",
            "0",
        ]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [str(INFLIGHT), "serve", *ports], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.printed = ""

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        assert self.process.stdout is not None
        deadline = self.started + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not (found := re.search(pattern, self.printed)):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                assert ready, f"not printed within {timeout} s: {pattern}\n{self.printed}"
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, self.printed
                self.printed += data.decode()
        return found


@pytest.fixture
def serve() -> Iterator[Serve]:
    started = Serve()
    with started.process as process:
        yield started
        process.kill()


def test_ready_in_15_s_first_token_in_1_s_and_ctrl_c_drains(serve: Serve):
    serve.wait_for("READY", READY_S)
    url = serve.wait_for(r"gRPC\s+(127\.0\.0\.1:\d+)", READY_S + 1).group(1)
    asked = subprocess.run(
        [str(INFLIGHT), "generate", "The capital of France is", "--url", url, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(asked.stdout)
    assert 0.0 < answer["ttft_s"] <= FIRST_TOKEN_S
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(timeout=30) == 0
