"""A tritonserver and the doors in front of it, for benchmarks that compare the ways to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from inflight.deploy import repository
from inflight.deploy.ports import HeldPorts
from inflight.deploy.tritonserver.endpoints import Endpoints
from inflight.deploy.tritonserver.server import Server
from inflight.ipc import health
from inflight.ipc.health import Health

START_TIMEOUT_S = 600.0
HEALTH_PERIOD_S = 0.3
DEFAULT_WORKERS = min(4, os.cpu_count() or 1)


@contextlib.contextmanager
def tritonserver(folder: Path, **settings: Any) -> Iterator[Endpoints]:
    """A tritonserver with the shipped models and these engine settings; yields its addresses."""
    models = folder / "models"
    for source in repository.shipped():
        shutil.copytree(source, models, dirs_exist_ok=True)
    (models / "llm" / "1" / "engine.json").write_text(json.dumps(settings))
    server = Server([models], ports=(0, 0, 0), log_file=folder / "log", drain_s=2.0)
    server.start()
    try:
        server.wait_ready(START_TIMEOUT_S)
        yield server.endpoints
        server.stop()
    finally:
        server.kill()


@contextlib.contextmanager
def door(
    kind: Literal["http", "grpc"],
    upstream: str,
    folder: Path,
    workers: int = DEFAULT_WORKERS,
    busy_poll_ms: float | None = None,
) -> Iterator[str]:
    """A door in front of `upstream`; yields its address.

    Args:
        upstream: host:port of a tritonserver.
        folder: for the health file that the door reads.
        workers: processes of the gRPC door; the HTTP door is one.
        busy_poll_ms: of the HTTP door; None for its default on this machine.
    """
    file, stop = folder / f"{kind}-health.json", threading.Event()
    held = HeldPorts("127.0.0.1", (0,))
    address = f"127.0.0.1:{held.numbers[0]}"
    command = [sys.executable, "-m", f"inflight.door.{kind}_door", "--listen", address]
    command += ["--upstream", upstream, "--health", str(file), "--drain", "1"]
    if kind == "grpc":
        command += ["--workers", str(workers)]
    if busy_poll_ms is not None:
        command += ["--busy-poll", str(busy_poll_ms)]
    writer = threading.Thread(target=_keep_healthy, args=(file, stop))
    writer.start()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()
        held.release()
        stop.set()
        writer.join()


@contextlib.contextmanager
def gateway(upstream: str, folder: Path, workers: int = 1) -> Iterator[tuple[str, list[int]]]:
    """A gateway in front of `upstream`; yields its address and the pids of its processes."""
    file, stop = folder / f"gateway-{workers}-health.json", threading.Event()
    held = HeldPorts("127.0.0.1", (0,))
    address = f"127.0.0.1:{held.numbers[0]}"
    command = [sys.executable, "-m", "inflight.door.gateway_door", "--listen", address]
    command += ["--upstream", upstream, "--health", str(file), "--drain", "1"]
    command += ["--gateway-shared", "--busy-poll", "0"]
    writer = threading.Thread(target=_keep_healthy, args=(file, stop))
    writer.start()
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(workers)]
    try:
        for process in processes:
            _wait_until_it_listens(address, process)
        time.sleep(1.0)  # the others listen on the same port
        yield address, [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        held.release()
        stop.set()
        writer.join()


def _keep_healthy(path: Path, stop: threading.Event) -> None:
    models = ["chat", "generate", "llm"]
    while not stop.is_set():
        health.write(path, Health(is_live=True, is_ready=True, models=models))
        stop.wait(HEALTH_PERIOD_S)


def _wait_until_it_listens(address: str, process: subprocess.Popen[bytes]) -> None:
    host, port = address.split(":")
    while process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port))).close()
            return
        time.sleep(0.05)
    sys.exit(f"the door exited with status {process.returncode}")
