"""Loads, replaces and unloads models of a running server, one after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from inflight import config as settings
from inflight.core.model_version import public_name, split_version, versioned
from inflight.deploy.catalog import Catalog
from inflight.deploy.model_group import ModelGroup, config_of
from inflight.errors import ConfigError, EngineError, InflightError
from inflight.ipc.control import ModelStatus, Progress
from inflight.ipc.engine_client import EngineClient, engine_config_path
from inflight.ipc.frames import Loading
from inflight.ipc.processes import Process

logger = logging.getLogger("inflight.supervisor")

OnProgress = Callable[[Progress], None]

POLL_S = 0.05
# Tokens that an engine has sent still pass the front, the detokenizer and the network.
SETTLE_S = 0.7
# The doors have read by then which versions there are.
PUBLISHED_S = 0.3
UNLOADING = "the model is unloading; send the request to another server"


class Engine(Protocol):
    """An engine's process (see `EngineChild`)."""

    config: Path
    on_progress: Callable[[Loading], None]

    @property
    def client(self) -> EngineClient | None: ...

    def problem(self) -> str: ...


class Fleet(Protocol):
    """What model control changes: engines and Triton's models. The supervisor implements it.

    Attributes:
        loaded: the groups that are served, by name; kept across restarts of tritonserver.
    """

    loaded: dict[str, ModelGroup]

    def engine_of(self, group: ModelGroup) -> Engine | None: ...

    def start_engine(self, group: ModelGroup, config: Path) -> Engine: ...

    def serve_with(self, engine: Any) -> Any:
        """Have fronts find this engine; returns the one before."""

    def retire_engine(self, engine: Any) -> None: ...

    def end_engine(self, engine: Any) -> None: ...

    def set_loaded(self, loaded: dict[str, ModelGroup]) -> None: ...

    def publish(self, without: ModelGroup | None = None) -> None:
        """Have doors know which versions are loaded, with one left out that is to be unloaded."""

    def changing(self, models: Iterable[str]) -> AbstractContextManager[list[Process]]: ...

    def load_model(self, name: str, config: str) -> None: ...

    def unload_models(self, names: Sequence[str], timeout_s: float) -> None: ...


class ModelControl:
    """Changes which models a server has. One thread at a time may call `load` and `unload`.

    Args:
        catalog: the models.
        fleet: the server.
        folder: for the settings of engines that differ from engine.json.
        drain_s: how long a request may take to finish when its model is unloaded or replaced.
    """

    def __init__(self, catalog: Catalog, fleet: Fleet, folder: Path, drain_s: float) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._folder = folder
        self._drain_s = drain_s
        self._num_loads = 0
        self._written: set[Path] = set()  # settings of engines with overrides
        self._changes: dict[str, str] = {}  # state by name of group

    def status(self, name: str | None = None) -> list[ModelStatus]:
        """Of all models in the repositories and all that are loaded, or of one."""
        groups = {**self._catalog.groups(), **self._fleet.loaded}
        found = sorted(groups.values(), key=lambda group: split_version(group.name))
        return [self._status(one) for one in found if name in (None, one.name, _model_of(one))]

    def load(
        self, name: str, overrides: Mapping[str, Any], on_progress: OnProgress
    ) -> list[ModelStatus]:
        """Load a model, or replace it; returns its status once it is ready.

        A model that is replaced serves until the new one is ready, and finishes its requests. Of a
        model with several versions, those that its policy selects are loaded unless they are, and
        then the others are unloaded; with @VERSION, that version is loaded or replaced.

        Args:
            overrides: of settings in engine.json.

        Raises:
            InflightError: it cannot be loaded. What was loaded before still is.
        """
        groups = self._catalog.find(name)
        model = _model_of(groups[0])
        if model == groups[0].name or split_version(name)[1] is not None:
            return self._load(groups[0], overrides, on_progress)
        if overrides:
            raise ConfigError(
                f"settings of {model} cannot be overridden for all its versions; name one, such as "
                f"{groups[-1].name}"
            )
        for group in groups:
            if group.name not in self._fleet.loaded:
                self._load(group, {}, on_progress)
        for former in self._loaded_of(model):
            if former not in groups:
                self._unload(former, on_progress)
        return self.status(model)

    def unload(self, name: str, on_progress: OnProgress) -> list[ModelStatus]:
        """Finish a model's requests and unload it, or all its versions; new requests are rejected
        meanwhile. With @VERSION, that version is unloaded, and new requests go to the others.

        Raises:
            InflightError: it is not loaded, or the server is stopping.
        """
        found = self._loaded_of(name) or self._loaded_of(_with_suffix(name))
        if not found:
            raise ConfigError(
                f"model {name} is not loaded; loaded: {', '.join(self._fleet.loaded) or 'none'}"
            )
        for group in found:
            self._unload(group, on_progress)
        names = {group.name for group in found}
        return [one for one in self.status() if one.name in names]

    def _loaded_of(self, name: str) -> list[ModelGroup]:
        """The loaded groups of a model, lowest version first, or of one version."""
        found = [one for one in self._fleet.loaded.values() if name in (one.name, _model_of(one))]
        return sorted(found, key=lambda group: split_version(group.name))

    def _load(
        self, group: ModelGroup, overrides: Mapping[str, Any], on_progress: OnProgress
    ) -> list[ModelStatus]:
        self._num_loads += 1
        config = engine_config_path(group.folder)
        if overrides:
            config = self._write_config(group, overrides)
        settings.load(config)
        self._changes[group.name] = "loading"
        engine = self._fleet.start_engine(group, config)
        try:
            self._wait_until_loaded(engine, on_progress)
            with self._fleet.changing(group.names) as old_stubs:
                old = self._swap(group, engine, on_progress)
                if old is not None:
                    on_progress(Progress("finishing the requests of the former engine"))
                    self._wait_for_requests(old, old_stubs)
                    self._fleet.end_engine(old)
                    self._remove(old.config)
        except InflightError:
            self._give_up(engine)
            self._remove(config)
            raise
        finally:
            del self._changes[group.name]
        self._publish(group)
        logger.warning("model %s is loaded", group.name)
        return self.status(group.name)

    def _unload(self, group: ModelGroup, on_progress: OnProgress) -> None:
        self._changes[group.name] = "unloading"
        try:
            self._publish(group, without=group)
            engine = self._fleet.engine_of(group)
            on_progress(Progress("finishing its requests"))
            is_idle = True
            if engine is not None and engine.client is not None:
                engine.client.drain(UNLOADING)
                is_idle = self._wait_for_requests(engine, [])
            on_progress(Progress("unloading"))
            self._fleet.set_loaded(_without(self._fleet.loaded, group))
            if engine is not None:
                self._fleet.retire_engine(engine)
                if not is_idle:  # Triton waits for requests, which fail now
                    self._fleet.end_engine(engine)
            with self._fleet.changing(group.names):
                self._unload_all(reversed(group.names))
            if engine is not None:
                if is_idle:
                    self._fleet.end_engine(engine)
                self._remove(engine.config)
        finally:
            del self._changes[group.name]
        logger.warning("model %s is unloaded", group.name)

    def _publish(self, changed: ModelGroup, without: ModelGroup | None = None) -> None:
        """After this, doors use the versions that are loaded, if the change is one of a version."""
        if changed.name != _model_of(changed):
            self._fleet.publish(without)
            time.sleep(PUBLISHED_S)

    def _write_config(self, group: ModelGroup, overrides: Mapping[str, Any]) -> Path:
        """An engine.json with overrides; its paths are absolute."""
        path = engine_config_path(group.folder)
        if "model" in overrides:
            raise ConfigError(
                "model: cannot be set here, as the tokenizers read it from engine.json; change it "
                "there and load the model again"
            )
        loaded = settings.load(path)
        raw = {**msgspec.json.decode(path.read_bytes()), **overrides, "model": loaded.model}
        drafting = loaded.speculative_config
        if drafting is not None and drafting.model and "speculative_config" not in overrides:
            raw["speculative_config"] = msgspec.to_builtins(drafting)
            raw.pop("speculation", None)
        settings.parse(raw, "settings")
        # The engine takes its model's name from the folder.
        found = self._folder / f"load-{self._num_loads}" / group.name / path.parent.name / path.name
        found.parent.mkdir(parents=True, mode=0o700)
        found.write_bytes(msgspec.json.encode(raw))
        self._written.add(found)
        return found

    def _wait_until_loaded(self, engine: Engine, on_progress: OnProgress) -> None:
        engine.on_progress = lambda loading: on_progress(Progress(loading.what, loading.fraction))
        while engine.client is None:
            problem = engine.problem()
            if problem:
                raise EngineError(f"the engine {problem}")
            time.sleep(POLL_S)

    def _swap(self, group: ModelGroup, engine: Engine, on_progress: OnProgress) -> Any:
        """Have Triton's models use a loaded engine; returns the former one.

        Raises:
            InflightError: a model cannot be loaded; then the former engine serves again.
        """
        fleet = self._fleet
        old = fleet.serve_with(engine)
        before = fleet.loaded.get(group.name)
        done: list[str] = []
        try:
            for place, folder in enumerate(group.members):
                on_progress(Progress(f"loading {folder.name}", place / len(group.members)))
                done.append(folder.name)
                fleet.load_model(folder.name, config_of(folder, self._num_loads))
        except InflightError:
            if old is not None:
                fleet.serve_with(old)
            else:
                fleet.retire_engine(engine)
            self._undo(before, done[:-1])
            self._unload_all(name for name in reversed(done) if not _has(before, name))
            raise
        if before is not None:  # of models that no longer belong to it
            self._unload_all(set(before.names) - set(group.names))
        fleet.set_loaded({**fleet.loaded, group.name: group})
        return old

    def _undo(self, before: ModelGroup | None, names: list[str]) -> None:
        """Load these models again, if they were loaded before, for the former engine."""
        former = {folder.name: folder for folder in before.members} if before is not None else {}
        self._num_loads += 1
        for name in names:
            folder = former.get(name)
            try:
                if folder is not None:
                    self._fleet.load_model(name, config_of(folder, self._num_loads))
            except InflightError as error:
                logger.error("model %s: %s", name, error)

    def _unload_all(self, names: Iterable[str]) -> None:
        try:
            self._fleet.unload_models(list(names), self._drain_s)
        except InflightError as error:
            logger.error("%s", error)

    def _give_up(self, engine: Engine) -> None:
        try:
            self._fleet.end_engine(engine)
        except InflightError as error:  # the server is stopping, and ends it
            logger.error("%s", error)

    def _wait_for_requests(self, engine: Engine, stubs: list[Process]) -> bool:
        """Wait until an engine has no request and these stubs have exited, for `drain_s` at most;
        returns whether they have.

        An engine that was replaced may get requests as long as the stubs of its time run.
        """
        deadline = time.monotonic() + self._drain_s
        had_requests = False
        while time.monotonic() < deadline:
            client = engine.client
            num = 0
            if client is not None:
                try:
                    stats = client.stats()
                except EngineError:
                    return True  # it has exited
                num = stats.num_running + stats.num_waiting + stats.num_suspended
            had_requests = had_requests or num > 0
            if num == 0 and not any(stub.is_running() for stub in stubs):
                if had_requests and not stubs:
                    time.sleep(SETTLE_S)
                return True
            time.sleep(POLL_S)
        return False

    def _remove(self, config: Path) -> None:
        """Remove the settings of an engine that has ended, if they were written for it."""
        if config in self._written:
            self._written.discard(config)
            config.unlink(missing_ok=True)
            for folder in list(config.parents)[:3]:
                folder.rmdir()

    def _status(self, group: ModelGroup) -> ModelStatus:
        loaded = self._fleet.loaded.get(group.name)
        engine = self._fleet.engine_of(group) if loaded is not None else None
        client = engine.client if engine is not None else None
        state = "unloaded" if loaded is None else "failed" if client is None else "ready"
        state = self._changes.get(group.name, state)
        _, version = split_version(group.name)
        known = ModelStatus(
            name=group.name,
            models=sorted(map(public_name, group.names)),
            state=state,
            version="" if version is None else str(version),
        )
        if client is None:
            return known
        try:
            stats = client.stats()
        except EngineError:
            return msgspec.structs.replace(known, state="failed")
        return msgspec.structs.replace(
            known,
            version=engine.config.parent.name if engine is not None else "",
            checkpoint=client.welcome.model_name,
            device=client.welcome.device,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting + stats.num_suspended,
        )


def _model_of(group: ModelGroup) -> str:
    """The model of which the group is a version, or its own name."""
    return public_name(group.name)


def _with_suffix(name: str) -> str:
    """The name of a model by its prefix, as in `Catalog.find`."""
    model, version = split_version(name)
    return f"{model}_llm" if version is None else versioned(f"{model}_llm", version)


def _has(group: ModelGroup | None, name: str) -> bool:
    return group is not None and name in group.names


def _without(groups: dict[str, ModelGroup], group: ModelGroup) -> dict[str, ModelGroup]:
    return {name: one for name, one in groups.items() if name != group.name}
