"""What `inflight model` asks of a server, and how it finds it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from control_server import FakeServer
from inflight.errors import CapacityError, ConfigError, EngineError, RequestError
from inflight.ipc import control
from inflight.ipc.control import (
    Failed,
    ListModels,
    LoadModel,
    Models,
    ModelStatus,
    Progress,
    UnloadModel,
)

LOADED = ModelStatus(name="llm", models=["llm"], state="ready")


Start = Callable[..., FakeServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[FakeServer] = []

    def begin(path: Path, *messages: Progress | Models | Failed) -> FakeServer:
        servers.append(FakeServer(path, *messages))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    "request_", [LoadModel("llm", {"num_blocks": 3}), UnloadModel("llm"), ListModels()]
)
def test_a_request_is_answered_after_its_progress(
    tmp_path: Path, start: Start, request_: control.Request
) -> None:
    response = Models("127.0.0.1:8000", [LOADED])
    server = start(tmp_path / "s", Progress("weights", 0.5), Progress("graphs"), response)
    seen: list[Progress] = []
    assert control.call(tmp_path / "s", request_, seen.append) == response
    assert server.requests == [request_]
    assert seen == [Progress("weights", 0.5), Progress("graphs")]


def test_an_error_keeps_its_kind(tmp_path: Path, start: Start) -> None:
    start(tmp_path / "s", Failed("capacity", "the GPU is full"))
    with pytest.raises(CapacityError, match=r"^the GPU is full$"):
        control.call(tmp_path / "s", ListModels())


def test_a_server_that_exits_or_does_not_listen_is_an_error(tmp_path: Path, start: Start) -> None:
    start(tmp_path / "s", Progress("weights"))
    with pytest.raises(EngineError, match="exited before it answered"):
        control.call(tmp_path / "s", ListModels())
    with pytest.raises(EngineError, match="does not answer"):
        control.call(tmp_path / "nothing", ListModels())


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", "a..b", "x" * 65, "file:x", "a b", "a\n", "ä", "%2e"]
)
def test_a_name_that_no_model_has_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="is not a model name; allowed: 1 to 64 letters"):
        control.check_name(name)


@pytest.mark.parametrize("name", ["llm", "two_llm", "Llama-3.1-8B", "x" * 64])
def test_a_name_is_accepted(name: str) -> None:
    assert control.check_name(name) == name


@pytest.mark.parametrize("line", [b"", b"[]\n", b'{"type": "drop"}\n', b'{"type": "load"}\n'])
def test_an_invalid_message_is_refused(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(line)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(RequestError, match="not valid"):
            control.receive_request(ours)


def server_folder(base: Path, pid: int) -> Path:
    folder = base / "inflight" / str(pid)
    folder.mkdir(parents=True, mode=0o700)
    return folder


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "inflight").mkdir(mode=0o700)
    return tmp_path


def test_the_only_server_is_found(base: Path, start: Start) -> None:
    with pytest.raises(ConfigError, match="start one with `inflight serve --model-control`"):
        control.find_server()
    path = server_folder(base, os.getpid()) / control.SOCKET
    start(path, Models("127.0.0.1:8000", []))
    assert control.find_server() == path
    assert control.find_server(8000) == path
    with pytest.raises(ConfigError, match="no server on port 8001 accepts"):
        control.find_server(8001)


def test_of_several_servers_one_has_to_be_chosen(base: Path, start: Start) -> None:
    first = server_folder(base, os.getpid()) / control.SOCKET
    second = server_folder(base, os.getppid()) / control.SOCKET
    start(first, Models("127.0.0.1:8000", []))
    start(second, Models("127.0.0.1:9000", []))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8000, 127\.0\.0\.1:9000; .* --port"):
        control.find_server()
    assert control.find_server(9000) == second
