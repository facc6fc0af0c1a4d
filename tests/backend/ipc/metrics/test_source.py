"""A model's metrics over several engine processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from attached_front import Front, running_engines
from inflight.errors import EngineError
from inflight.ipc.engine_client import STATS_TIMEOUT_S, EngineClient
from inflight.ipc.metrics.source import MetricsSource


def generate(front: Front, num_tokens: int) -> None:
    front.finish(front.submit([5, 6, 7], max_tokens=num_tokens, ignore_eos=True))


def test_counters_continue_after_the_engine_is_killed(model_directory: Path) -> None:
    (model_directory / "1").rename(model_directory / "2")
    client: EngineClient | None = None
    source = MetricsSource(model_directory, lambda: client)
    assert source.read() is None
    front = Front(model_directory)
    client = front.client
    generate(front, 7)
    client.refused({"invalid": 2})
    found = source.read()
    assert found is not None
    assert found.labels["model"] == "llm"
    assert found.labels["version"] == "2"
    assert found.metrics.value("generation_tokens") == 7
    assert found.metrics.value("requests_refused", "invalid", "front") == 2
    assert found.metrics.value("engine_up") == 1

    (engine,) = running_engines(model_directory)
    os.kill(engine, signal.SIGKILL)
    assert front.events.get(timeout=60) is None, "the connection is not lost"
    started = time.monotonic()
    with pytest.raises(EngineError, match="the engine has exited"):
        client.metrics()
    assert time.monotonic() - started < STATS_TIMEOUT_S, "a dead engine is waited for"
    found = source.read()
    assert found is not None
    assert found.metrics.value("generation_tokens") == 7
    assert found.metrics.value("engine_up") == 0

    client = None
    assert source.read() is not None
    front = Front(model_directory)
    client = front.client
    generate(front, 5)
    found = source.read()
    assert found is not None
    assert found.metrics.value("generation_tokens") == 12
    assert found.metrics.value("request_success", "length") == 2
    assert found.metrics.value("engine_restarts") == 1
    assert found.metrics.value("engine_up") == 1
    client.close()


def test_latencies_start_when_the_front_submits(model_directory: Path) -> None:
    front = Front(model_directory)
    generate(front, 1)
    counts, seconds = front.client.metrics().histogram("time_to_first_token_seconds")
    assert sum(counts) == 1
    assert 0.0 < seconds < 10.0
    front.client.close()
