"""`inflight model` shows what a server answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from control_server import FakeServer
from inflight.cli.app import app
from inflight.errors import InflightError, RequestError
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

LOADED = ModelStatus(
    name="llm",
    models=["generate", "llm"],
    state="ready",
    version="2",
    checkpoint="Tiny",
    device="GPU",
    num_blocks=100,
    num_free_blocks=60,
    num_running=3,
    num_waiting=1,
)
UNLOADED = ModelStatus(name="two_llm", models=["two_llm"], state="unloaded")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "inflight" / str(os.getpid())
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    return folder / control.SOCKET


@pytest.fixture
def server(path: Path) -> Iterator[FakeServer]:
    found = FakeServer(path, Progress("weights", 0.5), Models("127.0.0.1:8000", [LOADED, UNLOADED]))
    yield found
    found.close()


def test_the_models_are_listed(server: FakeServer) -> None:
    shown = CliRunner().invoke(app, ["model", "list"]).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0][:3] == ["MODEL", "VERSION", "STATE"]
    assert " ".join(lines[1]) == "llm 2 ready Tiny GPU 60 of 100 3 running, 1 waiting"
    assert lines[2] == ["two_llm", "unloaded"]
    assert set(map(type, server.requests)) == {ListModels}


def test_programs_get_one_json_object(server: FakeServer) -> None:
    found = json.loads(CliRunner().invoke(app, ["model", "list", "--json"]).stdout)
    assert found["server"] == "127.0.0.1:8000"
    assert found["models"][0]["num_free_blocks"] == 60


def test_a_load_sends_the_settings(server: FakeServer) -> None:
    arguments = ["model", "load", "llm", "--set", "num_blocks=5", "--set", "dtype=float32"]
    assert CliRunner().invoke(app, [*arguments, "--port", "8000"]).exit_code == 0
    assert server.requests[-1] == LoadModel("llm", {"num_blocks": 5, "dtype": "float32"})
    assert CliRunner().invoke(app, ["model", "unload", "llm"]).exit_code == 0
    assert server.requests[-1] == UnloadModel("llm")


def test_a_name_that_no_model_has_is_not_sent(server: FakeServer) -> None:
    found = CliRunner().invoke(app, ["model", "load", "../x"])
    assert isinstance(found.exception, RequestError)
    assert server.requests == []


def test_an_error_of_the_server_is_that_of_the_command(path: Path) -> None:
    server = FakeServer(path, Failed("config", "there is no model x"))
    try:
        found = CliRunner().invoke(app, ["model", "list"])
        assert isinstance(found.exception, InflightError)
    finally:
        server.close()


def test_model_control_is_off_by_default() -> None:
    found = CliRunner().invoke(app, ["serve", "--load-model", "llm"])
    assert found.exit_code == 2
    assert "--load-model requires --model-control" in found.output
