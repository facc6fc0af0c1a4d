"""How a front finds the engines of its model, and what a lost one leaves."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from inflight.ipc.engine_client import EngineClient, engine_sockets, socket_path
from inflight.ipc.frames import Connection, Welcome
from waiting import PATIENCE_S, wait_until


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    socket_path(tmp_path / "llm", os.getpid()).parent.mkdir(parents=True, exist_ok=True)
    return tmp_path / "llm"


def test_an_engine_that_is_never_replaced_has_one_socket(model: Path) -> None:
    assert engine_sockets(model, os.getpid()) == [socket_path(model, os.getpid())]


def test_an_engine_and_the_one_that_it_replaces_have_one_each(model: Path) -> None:
    first, second = (socket_path(model, os.getpid(), generation) for generation in (1, 2))
    link = socket_path(model, os.getpid())
    link.symlink_to(first)
    first.touch()
    assert engine_sockets(model, os.getpid()) == [first]
    second.touch()
    assert engine_sockets(model, os.getpid()) == [first, second]
    first.unlink()
    assert engine_sockets(model, os.getpid()) == [second]


def test_a_lost_engine_leaves_no_thread() -> None:
    """A front lives as long as tritonserver, and loses an engine with each restart."""
    before = set(threading.enumerate())
    ours, engines = socket.socketpair()
    lost = threading.Event()
    welcome = Welcome("llm", 100, 64, 10, 16, [99], 8, has_tokenizer=False)
    EngineClient(Connection(ours), welcome, lambda events: None, lost.set, lambda progress: None)
    assert len(set(threading.enumerate()) - before) == 2
    engines.close()
    assert lost.wait(PATIENCE_S)
    wait_until(lambda: not set(threading.enumerate()) - before)
