"""Servers as `inflight ps` lists them, from the files that their supervisors write."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inflight.cli import ps
from inflight.deploy.metrics import MetricsServer, render
from inflight.ipc import health
from inflight.ipc.health import Health
from inflight.ipc.metrics.source import ModelMetrics
from inflight.ipc.runtime_folder import folder_of
from metric_snapshots import empty, with_values

LABELS = {"model_name": "small", "engine": "0", "model": "llm", "version": "1"}
KINDS = ("http", "grpc", "metrics", "engine_metrics")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def written(**fields: Any) -> None:
    """This process is the supervisor of a server."""
    endpoints = {kind: f"127.0.0.1:{port}" for port, kind in enumerate(KINDS, 1)}
    usual: dict[str, Any] = {"is_live": True, "is_ready": True, "endpoints": endpoints}
    found = Health(**{**usual, **fields})
    health.write(folder_of(os.getpid()) / health.HEALTH_FILE, found)


def test_without_a_server_the_next_command_is_named(inflight: Run) -> None:
    status, out, err = inflight("ps")
    assert (status, out) == (0, "")
    assert "inflight serve" in err
    assert inflight("ps", "--json")[1] == "[]\n"


def age_s() -> float:
    """Of this process."""
    return time.time() - float(psutil.Process().create_time())


def test_a_server_is_listed_with_its_requests_in_flight(inflight: Run) -> None:
    metrics = with_values(
        empty(), num_requests_running=3, num_requests_waiting=2, num_requests_suspended=1
    )
    server = MetricsServer(("127.0.0.1", 0), lambda: render([ModelMetrics(LABELS, metrics)]))
    try:
        address = "{}:{}".format(*server.address)
        written(models=["chat", "llm"], endpoints={"http": "a:1", "engine_metrics": address})
        before_s = age_s()
        (found,) = json.loads(inflight("ps", "--json")[1])
        _, out, _ = inflight("ps")
    finally:
        server.close()
    assert (found["pid"], found["state"], found["in_flight"]) == (os.getpid(), "ready", 6)
    assert (found["http"], found["models"]) == ("a:1", ["chat", "llm"])
    assert before_s - 2 <= found["uptime_s"] <= age_s() + 2
    for cell in (str(os.getpid()), "ready", "a:1", address, "chat, llm"):
        assert cell in out


def test_a_server_that_is_not_ready_has_its_reason(inflight: Run) -> None:
    written(is_ready=False, reason="the engine of llm is loading")
    (found,) = ps.running()
    assert (found.state, found.in_flight) == ("not ready", None)
    assert "the engine of llm is loading" in inflight("ps")[1]
    written(is_ready=False, is_live=False, reason="tritonserver was killed")
    assert ps.running()[0].state == "failing"


def test_a_server_that_does_not_answer_is_listed_by_its_pid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written()
    monkeypatch.setattr(health, "MAX_AGE_S", 0.0)
    (found,) = ps.running()
    assert (found.pid, found.state, found.http) == (os.getpid(), "no answer", "")


def test_a_tritonserver_without_a_supervisor_is_listed(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        folder_of(process.pid)
        # After its exec, a process has no arguments for a moment.
        while "tritonserver" not in " ".join(psutil.Process(process.pid).cmdline()):
            pass  # before its exec
        (found,) = ps.running()
        process.kill()
    assert (found.pid, found.state) == (process.pid, "no answer")


def test_an_abandoned_folder_with_the_pid_of_another_process_is_no_server() -> None:
    folder_of(os.getpid())
    assert ps.running() == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59, "59s"), (60, "1m 0s"), (7_500, "2h 5m"), (90_061, "1d 1h"), (-3, "0s")],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert ps.duration(seconds) == text
