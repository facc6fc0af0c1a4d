"""The order in which a model's engine and Triton's models are changed, and what remains after an
error."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from inflight.deploy import repository
from inflight.deploy.catalog import Catalog
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
    def __init__(self, model: str, number: int, config: Path, log: list[str], problem: str) -> None:
        self.model = model
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
        self.engines: dict[str, FakeEngine] = {}
        self._num_engines = 0

    @property
    def engine(self) -> FakeEngine | None:
        """Of the model `llm`."""
        return self.engines.get("llm")

    def engine_of(self, group: ModelGroup) -> FakeEngine | None:
        return self.engines.get(group.name)

    def start_engine(self, group: ModelGroup, config: Path) -> FakeEngine:
        self._num_engines += 1
        self.log.append(f"start {self._num_engines}")
        return FakeEngine(group.name, self._num_engines, config, self.log, self.problem)

    def serve_with(self, engine: FakeEngine) -> FakeEngine | None:
        before = self.engines.get(engine.model)
        self.engines[engine.model] = engine
        self.log.append(f"serve {engine.number}")
        return before

    def retire_engine(self, engine: FakeEngine) -> None:
        self.log.append(f"retire {engine.number}")
        del self.engines[engine.model]

    def end_engine(self, engine: FakeEngine) -> None:
        self.log.append(f"end {engine.number}")

    def set_loaded(self, loaded: dict[str, ModelGroup]) -> None:
        self.loaded = loaded
        self.log.append(f"loaded: {', '.join(loaded)}")

    def publish(self, without: ModelGroup | None = None) -> None:
        names = [name for name, one in self.loaded.items() if one != without]
        self.log.append(f"publish: {', '.join(names)}")

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

    def unload_models(self, names: Sequence[str], timeout_s: float) -> None:
        self.log += [f"-{name}" for name in names]


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
    monkeypatch.setattr(model_control, "PUBLISHED_S", 0.0)
    return FakeFleet()


@pytest.fixture
def control(models: Path, fleet: FakeFleet, tmp_path: Path) -> ModelControl:
    return ModelControl(Catalog([models], tmp_path / "v"), fleet, tmp_path / "run", drain_s=5.0)


@pytest.fixture
def versions(models: Path, fleet: FakeFleet, tmp_path: Path) -> ModelControl:
    """Of a model with the versions 1, 2 and 3, of which the policy selects the highest two."""
    for version in ("2", "3"):
        shutil.copytree(models / "llm" / "1", models / "llm" / version)
    write_policy(models, "latest { num_versions: 2 }")
    return ModelControl(Catalog([models], tmp_path / "v"), fleet, tmp_path / "run", drain_s=5.0)


def write_policy(models: Path, policy: str) -> None:
    with open(models / "llm" / "config.pbtxt", "a") as file:
        file.write(f"\nversion_policy {{ {policy} }}\n")


def changes(fleet: FakeFleet) -> list[str]:
    """What has happened to versions, without the models of each."""
    found = [one for one in fleet.log if re.match(r"loaded|publish|drain", one)]
    fleet.log.clear()
    return found


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


def test_a_load_follows_the_policy_and_then_unloads_the_others(
    versions: ModelControl, fleet: FakeFleet, models: Path
) -> None:
    found = versions.load("llm", {}, nothing)
    assert [(one.name, one.version, one.state) for one in found] == [
        ("llm@1", "1", "unloaded"),
        ("llm@2", "2", "ready"),
        ("llm@3", "3", "ready"),
    ]
    assert changes(fleet) == [
        *("loaded: llm@2", "publish: llm@2", "loaded: llm@2, llm@3", "publish: llm@2, llm@3"),
    ]
    shutil.copytree(models / "llm" / "1", models / "llm" / "10")
    versions.load("llm", {}, nothing)
    assert changes(fleet) == [
        *("loaded: llm@2, llm@3, llm@10", "publish: llm@2, llm@3, llm@10"),
        *("publish: llm@3, llm@10", f"drain: {model_control.UNLOADING}", "loaded: llm@3, llm@10"),
    ]
    versions.load("llm", {}, nothing)
    assert changes(fleet) == [], "they are loaded"


def test_a_version_is_loaded_and_unloaded_by_its_name(
    versions: ModelControl, fleet: FakeFleet
) -> None:
    for _ in range(2):
        (status,) = versions.load("llm@1", {"num_blocks": 5}, nothing)
        assert (status.name, status.version, status.state) == ("llm@1", "1", "ready")
        assert changes(fleet) == ["loaded: llm@1", "publish: llm@1"]
    versions.load("llm", {}, nothing)
    assert list(fleet.loaded) == ["llm@2", "llm@3"], "the policy does not select version 1"
    changes(fleet)
    (status,) = versions.unload("llm@3", nothing)
    assert (status.name, status.state) == ("llm@3", "unloaded")
    assert changes(fleet) == [
        *("publish: llm@2", f"drain: {model_control.UNLOADING}", "loaded: llm@2"),
    ]
    versions.load("llm", {}, nothing)
    assert [one.state for one in versions.unload("llm", nothing)] == ["unloaded", "unloaded"]
    assert fleet.loaded == {} and fleet.engines == {}


def test_a_version_that_is_not_there_is_named(versions: ModelControl, fleet: FakeFleet) -> None:
    for name, words in (
        ("llm@4", "model llm has no version 4; allowed: 1, 2, 3"),
        ("two@1", "no model two with an engine; allowed: llm"),
    ):
        with pytest.raises(ConfigError, match=words):
            versions.load(name, {}, nothing)
    with pytest.raises(ConfigError, match="for all its versions; name one, such as llm@3"):
        versions.load("llm", {"num_blocks": 5}, nothing)
    with pytest.raises(ConfigError, match="model llm@2 is not loaded; loaded: none"):
        versions.unload("llm@2", nothing)
    assert fleet.log == []


def test_a_model_without_a_policy_has_one_version(control: ModelControl) -> None:
    with pytest.raises(ConfigError, match="model llm has one version at a time"):
        control.load("llm@1", {}, nothing)
