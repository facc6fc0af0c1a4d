"""An engine takes over from another one of its model, and back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from inflight.ipc import engine_client
from inflight.ipc.owner import Owner
from inflight.supervision.engine_set import EngineSet
from inflight.supervision.engines import EngineChild


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    checkpoint = tiny.write_llama(tmp_path / "checkpoint")
    for version, num_blocks in ((1, 10), (2, 20)):
        path = tmp_path / "llm" / str(version) / "engine.json"
        path.parent.mkdir(parents=True)
        settings = {"model": str(checkpoint.path), "device": "echo", "num_blocks": num_blocks}
        path.write_text(json.dumps(settings))
    return tmp_path / "llm"


@pytest.fixture
def engines(tmp_path: Path, model: Path) -> Iterator[EngineSet]:
    owner = Owner(os.getpid(), is_supervisor=True)
    found = EngineSet(owner, tmp_path / "log", are_replaced=True)
    yield found
    found.end_all()


def wait_until_loaded(engine: EngineChild) -> None:
    deadline = time.monotonic() + 60
    while engine.client is None:
        assert not engine.problem() and time.monotonic() < deadline, engine.problem()
        time.sleep(0.02)


def num_blocks(model: Path) -> int:
    """Of the engine that a front would attach to."""
    client = engine_client.attach(engine_client.socket_path(model, os.getpid()), "observer")
    try:
        return client.welcome.num_blocks
    finally:
        client.close()


def config(model: Path, version: int) -> Path:
    return model / str(version) / "engine.json"


def test_fronts_find_the_engine_that_serves(engines: EngineSet, model: Path) -> None:
    first = engines.start(model, config(model, 1))
    assert (engines.of(model), engines.keepers) == (None, [])
    wait_until_loaded(first)
    assert engines.serve(first) is None
    assert num_blocks(model) == 10

    second = engines.start(model, config(model, 2))
    wait_until_loaded(second)
    assert num_blocks(model) == 10, "the new one does not serve yet"
    assert engines.pids == {first.pid, second.pid}
    assert engines.serve(second) is first
    assert num_blocks(model) == 20
    assert [keeper.child for keeper in engines.keepers] == [second]

    assert engines.serve(first) is second
    assert num_blocks(model) == 10, "and back"
    assert engines.serve(second) is first
    first.close()
    engines.forget(first)
    assert num_blocks(model) == 20, "the end of the former one removes nothing of this one"

    third = engines.start(model, config(model, 1))
    wait_until_loaded(third)
    assert engines.serve(third) is second
    assert num_blocks(model) == 10
    assert engines.pids == {second.pid, third.pid}


def test_an_engine_that_took_over_is_restarted_in_its_place(
    engines: EngineSet, model: Path
) -> None:
    for version in (1, 2):
        engine = engines.start(model, config(model, version))
        wait_until_loaded(engine)
        former = engines.serve(engine)
        if former is not None:
            former.close()
            engines.forget(former)
    (keeper,) = engines.keepers
    engine.kill()
    while engine.client is not None:
        time.sleep(0.01)
    keeper.poll()
    wait_until_loaded(engine)
    assert keeper.num_restarts == 1
    assert num_blocks(model) == 20


def test_a_retired_engine_is_not_restarted(engines: EngineSet, model: Path) -> None:
    engine = engines.start(model, config(model, 1))
    wait_until_loaded(engine)
    engines.serve(engine)
    engines.retire(engine)
    assert (engines.of(model), engines.keepers, engines.pids) == (None, [], {engine.pid})
    engine.close()
    engines.forget(engine)
    assert engines.pids == set()
    beats = list(engine_client.socket_path(model, os.getpid()).parent.glob("*.beat"))
    assert beats == []
