"""Requests of `inflight model` reach the models of the server, one change at a time."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError, EngineError, RequestError
from inflight.ipc import control
from inflight.ipc.control import (
    ListModels,
    LoadModel,
    Models,
    ModelStatus,
    Progress,
    UnloadModel,
)
from inflight.supervision.models.control_socket import ControlSocket
from waiting import PATIENCE_S, wait_until

SERVER = "127.0.0.1:8000"


class FakeModels:
    """Writes down what is called, and on which thread."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self.num_at_once = 0
        self.most_at_once = 0

    def status(self, name: str | None = None) -> list[ModelStatus]:
        return [ModelStatus(name="llm", models=["llm"], state="ready")]

    def load(
        self, name: str, overrides: Mapping[str, Any], on_progress: Callable[[Progress], None]
    ) -> list[ModelStatus]:
        return self._change("load", name, dict(overrides), on_progress)

    def unload(self, name: str, on_progress: Callable[[Progress], None]) -> list[ModelStatus]:
        return self._change("unload", name, {}, on_progress)

    def _change(self, *arguments: Any) -> list[ModelStatus]:
        self.log.append(arguments[:-1])
        self.threads.add(threading.get_ident())
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        arguments[-1](Progress("weights", 0.5))
        self.may_end.wait(PATIENCE_S)
        time.sleep(0.01)
        self.num_at_once -= 1
        if self.error is not None:
            raise self.error
        return self.status()


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


@pytest.fixture
def path(tmp_path: Path, models: FakeModels) -> Iterator[Path]:
    served = ControlSocket(tmp_path / "control.sock", models, SERVER)  # type: ignore[arg-type]
    yield tmp_path / "control.sock"
    served.close()


def test_each_request_reaches_the_models(path: Path, models: FakeModels) -> None:
    response = Models(SERVER, models.status())
    seen: list[Progress] = []
    assert control.call(path, LoadModel("llm", {"num_blocks": 3}), seen.append) == response
    assert control.call(path, UnloadModel("llm")) == response
    assert control.call(path, ListModels()) == response
    assert models.log == [("load", "llm", {"num_blocks": 3}), ("unload", "llm", {})]
    assert seen == [Progress("weights", 0.5)]


def test_only_the_user_of_the_server_opens_the_socket(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_changes_run_one_after_another_on_one_thread(path: Path, models: FakeModels) -> None:
    """A thread that lives as long as the server; lists are answered meanwhile."""
    models.may_end.clear()
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(control.call, path, LoadModel(f"m{i}")) for i in range(8)]
        control.call(path, ListModels())
        assert not any(one.done() for one in found)
        models.may_end.set()
    assert all(one.result().models for one in found)
    assert (models.most_at_once, len(models.threads), len(models.log)) == (1, 1, 8)


def test_errors_reach_the_client_without_internals(path: Path, models: FakeModels) -> None:
    models.error = ConfigError("there is no model x")
    with pytest.raises(ConfigError, match=r"^there is no model x$"):
        control.call(path, LoadModel("x"))
    models.error = KeyError("/some/path")
    with pytest.raises(EngineError, match=r"^the request failed: KeyError; see the server's log$"):
        control.call(path, LoadModel("x"))
    models.error = None
    assert control.call(path, LoadModel("x")).models, "the thread goes on"


@pytest.mark.parametrize("name", ["../x", "a/b", "file:1/model", ""])
def test_a_name_that_no_model_has_is_refused(path: Path, models: FakeModels, name: str) -> None:
    for request in (LoadModel(name), UnloadModel(name)):
        with pytest.raises(RequestError, match="is not a model name"):
            control.call(path, request)
    assert models.log == []


def test_a_client_that_leaves_does_not_end_the_change(path: Path, models: FakeModels) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        control.send(sock, LoadModel("llm"))
    wait_until(lambda: models.log)
    assert control.call(path, UnloadModel("llm")).models
    assert models.log == [("load", "llm", {}), ("unload", "llm", {})]
