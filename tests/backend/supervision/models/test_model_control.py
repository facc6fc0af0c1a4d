"""The order in which a model's engine and Triton's models are changed, and what remains after an
error."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from inflight.deploy import repository
from inflight.deploy.model_group import ModelGroup
from inflight.engine.stats import Stats
from inflight.errors import ConfigError, EngineError
from inflight.ipc.control import Progress
from inflight.ipc.frames import Loading
from inflight.ipc.processes import Process
from inflight.supervision.models import model_control
from inflight.supervision.models.model_control import ModelControl

IDLE = Stats(*(0 for _ in Stats.__struct_fields__))


@dataclass
class Welcome:
    model_name: str = "tiny"
    device: str = "echo"


class FakeClient:
    """An engine with `num_running` requests, one of which ends at each look."""

    def __init__(self, log: list[str]) -> None:
        self.welcome = Welcome()
        self.num_running = 0
        self._log = log

    def drain(self, reason: str) -> None:
        self._log.append(f"drain: {reason}")

    def stats(self) -> Stats:
        found = msgspec.structs.replace(IDLE, num_running=self.num_running, num_blocks=9)
        self.num_running = max(0, self.num_running - 1)
        return found


class FakeEngine:
    def __init__(self, number: int, config: Path, log: list[str], problem: str) -> None:
        self.number = number
        self.config = config
        self.client = None if problem else FakeClient(log)
        self.on_progress: Callable[[Loading], None] = lambda loading: None
        self._problem = problem

    def problem(self) -> str:
        self.on_progress(Loading("weights", 0.5))
        return self._problem


class FakeFleet:
    """Writes down what is done.

    Attributes:
        problem: of the next engine.
        broken: the model that Triton does not load.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.loaded: dict[str, ModelGroup] = {}
        self.problem = ""
        self.broken = ""
        self.engine: FakeEngine | None = None
        self._num_engines = 0

    def engine_of(self, group: ModelGroup) -> FakeEngine | None:
        return self.engine

    def start_engine(self, group: ModelGroup, config: Path) -> FakeEngine:
        self._num_engines += 1
        self.log.append(f"start {self._num_engines}")
        return FakeEngine(self._num_engines, config, self.log, self.problem)

    def serve_with(self, engine: FakeEngine) -> FakeEngine | None:
        before, self.engine = self.engine, engine
        self.log.append(f"serve {engine.number}")
        return before

    def retire_engine(self, engine: FakeEngine) -> None:
        self.log.append(f"retire {engine.number}")
        self.engine = None

    def end_engine(self, engine: FakeEngine) -> None:
        self.log.append(f"end {engine.number}")

    def set_loaded(self, loaded: dict[str, ModelGroup]) -> None:
        self.loaded = loaded
        self.log.append(f"loaded: {', '.join(loaded)}")

    @contextlib.contextmanager
    def changing(self, models: Iterable[str]) -> Iterator[list[Process]]:
        self.log.append("changing")
        try:
            yield []
        finally:
            self.log.append("changed")

    def load_model(self, name: str, config: str) -> None:
        if name == self.broken:
            raise EngineError(f"model {name}: it is broken")
        self.log.append(f"+{name}")

    def unload_model(self, name: str, timeout_s: float) -> None:
        self.log.append(f"-{name}")


ALL = ["chat_tokenizer", "detokenizer", "tokenizer", "llm", "chat", "generate"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for source in repository.shipped():
        shutil.copytree(source, tmp_path / "models", dirs_exist_ok=True)
    return tmp_path / "models"


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(model_control, "POLL_S", 0.0)
    monkeypatch.setattr(model_control, "SETTLE_S", 0.0)
    return FakeFleet()


@pytest.fixture
def control(models: Path, fleet: FakeFleet, tmp_path: Path) -> ModelControl:
    return ModelControl([models], fleet, tmp_path / "run", drain_s=5.0)


def nothing(progress: Progress) -> None:
    pass


def test_an_engine_loads_before_triton_s_models(control: ModelControl, fleet: FakeFleet) -> None:
    (status,) = control.load("llm", {}, nothing)
    loads = [f"+{name}" for name in ALL]
    assert fleet.log == ["start 1", "changing", "serve 1", *loads, "loaded: llm", "changed"]
    assert (status.state, status.version, status.checkpoint) == ("ready", "1", "tiny")
    assert status.models == sorted(ALL)


def test_a_replacement_loads_beside_the_former_engine(
    control: ModelControl, fleet: FakeFleet
) -> None:
    control.load("llm", {}, nothing)
    fleet.log.clear()
    assert fleet.engine is not None and fleet.engine.client is not None
    fleet.engine.client.num_running = 3
    former = fleet.engine.client
    control.load("llm", {}, nothing)
    loads = [f"+{name}" for name in ALL]
    assert fleet.log == [
        *("start 2", "changing", "serve 2", *loads, "loaded: llm"),
        *("end 1", "changed"),
    ]
    assert former.num_running == 0, "its requests have finished"


def test_unloading_finishes_requests_first(control: ModelControl, fleet: FakeFleet) -> None:
    control.load("llm", {}, nothing)
    fleet.log.clear()
    assert fleet.engine is not None and fleet.engine.client is not None
    fleet.engine.client.num_running = 3
    (status,) = control.unload("llm", nothing)
    unloads = [f"-{name}" for name in reversed(ALL)]
    drain = f"drain: {model_control.UNLOADING}"
    assert fleet.log == [
        *(drain, "loaded: ", "retire 1", "changing", *unloads, "changed", "end 1"),
    ]
    assert status.state == "unloaded"
    with pytest.raises(ConfigError, match="model llm is not loaded; loaded: none"):
        control.unload("llm", nothing)


@pytest.mark.parametrize("was_loaded", [False, True])
def test_an_engine_that_cannot_load_changes_nothing(
    control: ModelControl, fleet: FakeFleet, was_loaded: bool
) -> None:
    if was_loaded:
        control.load("llm", {}, nothing)
    before, number = fleet.engine, 2 if was_loaded else 1
    fleet.log.clear()
    fleet.problem = "cannot load: there is no such checkpoint"
    with pytest.raises(EngineError, match="the engine cannot load: there is no such checkpoint"):
        control.load("llm", {"num_blocks": 5}, nothing)
    assert fleet.log == [f"start {number}", f"end {number}"]
    assert fleet.engine is before
    assert [one.state for one in control.status()] == ["ready" if was_loaded else "unloaded"]


def test_a_model_that_triton_refuses_is_taken_back(control: ModelControl, fleet: FakeFleet) -> None:
    fleet.broken = "llm"
    with pytest.raises(EngineError, match="model llm: it is broken"):
        control.load("llm", {}, nothing)
    assert fleet.log == [
        *("start 1", "changing", "serve 1", "+chat_tokenizer", "+detokenizer", "+tokenizer"),
        *("retire 1", "-llm", "-tokenizer", "-detokenizer", "-chat_tokenizer", "changed", "end 1"),
    ]
    assert fleet.loaded == {}


def test_a_replacement_that_triton_refuses_leaves_the_former_one(
    control: ModelControl, fleet: FakeFleet
) -> None:
    """Models that have been loaded with the new engine are loaded again, with the former one."""
    control.load("llm", {}, nothing)
    fleet.log.clear()
    fleet.broken = "tokenizer"
    with pytest.raises(EngineError, match="model tokenizer: it is broken"):
        control.load("llm", {}, nothing)
    assert fleet.log == [
        *("start 2", "changing", "serve 2", "+chat_tokenizer", "+detokenizer"),
        *("serve 1", "+chat_tokenizer", "+detokenizer", "changed", "end 2"),
    ]
    assert fleet.engine is not None and fleet.engine.number == 1
    assert list(fleet.loaded) == ["llm"]


def test_overrides_are_checked_and_written_for_the_engine(
    control: ModelControl, fleet: FakeFleet, tmp_path: Path
) -> None:
    for changes, words in (
        ({"num_block": 5}, "unknown key 'num_block'"),
        ({"num_blocks": "5"}, "num_blocks: '5' is of the wrong type"),
        ({"model": "other"}, "model: cannot be set here"),
    ):
        with pytest.raises(ConfigError, match=words):
            control.load("llm", changes, nothing)
    assert fleet.log == []
    control.load("llm", {"num_blocks": 5}, nothing)
    assert fleet.engine is not None
    written = fleet.engine.config
    assert msgspec.json.decode(written.read_bytes())["num_blocks"] == 5
    assert written.parent.parent.name == "llm" and written.parent.name == "1"
    control.load("llm", {}, nothing)
    assert list((tmp_path / "run").iterdir()) == [], "settings end with their engine"


def test_progress_is_that_of_the_engine_and_of_triton(
    control: ModelControl, fleet: FakeFleet
) -> None:
    seen: list[Progress] = []
    fleet.problem = "exited"
    with pytest.raises(EngineError):
        control.load("llm", {}, seen.append)
    fleet.problem = ""
    control.load("llm", {}, seen.append)
    assert seen[0] == Progress("weights", 0.5)
    assert seen[1] == Progress("loading chat_tokenizer", 0.0)
    assert seen[-1].what == "loading generate"
