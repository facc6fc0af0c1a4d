"""How a front finds the engines of its model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.ipc.engine_client import engine_sockets, socket_path


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
