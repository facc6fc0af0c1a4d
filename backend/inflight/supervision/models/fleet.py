"""A server's engines and Triton's models, as model control changes them: `model_control.Fleet`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from inflight.deploy.model_group import ModelGroup
from inflight.deploy.tritonserver.server import Server
from inflight.ipc.processes import Process
from inflight.supervision.engine_set import EngineSet
from inflight.supervision.engines import EngineChild
from inflight.supervision.models.main_thread import MainThread
from inflight.supervision.triton_child import TritonChild


class ServerFleet:
    """Changes engines on the main thread, and Triton's models on the caller's.

    Args:
        engines: of the server.
        triton: its tritonserver, as the supervisor sees it.
        server: that tritonserver.
        main: the supervisor's main thread.
        others: names of models that belong to no group; they stay loaded.
        on_change: called with the names of Triton's models that clients can reach.
        write_health: tells the doors; called on the main thread.
    """

    def __init__(
        self,
        engines: EngineSet,
        triton: TritonChild,
        server: Server,
        main: MainThread,
        others: list[str],
        on_change: Callable[[list[str]], None],
        write_health: Callable[[], None],
    ) -> None:
        self.loaded: dict[str, ModelGroup] = {}
        self._others = others
        self._engines = engines
        self._triton = triton
        self._server = server
        self._main = main
        self._on_change = on_change
        self._write_health = write_health

    def engine_of(self, group: ModelGroup) -> EngineChild | None:
        return self._engines.of(group.folder)

    def start_engine(self, group: ModelGroup, config: Path) -> EngineChild:
        return self._main.run(lambda: self._engines.start(group.folder, config))

    def serve_with(self, engine: EngineChild) -> EngineChild | None:
        return self._main.run(lambda: self._engines.serve(engine))

    def retire_engine(self, engine: EngineChild) -> None:
        self._main.run(lambda: self._engines.retire(engine))

    def end_engine(self, engine: EngineChild) -> None:
        engine.close()  # takes a while: not on the main thread
        self._main.run(lambda: self._engines.forget(engine))

    def set_loaded(self, loaded: dict[str, ModelGroup]) -> None:
        self.loaded = loaded
        names = [*self._others, *(name for group in loaded.values() for name in group.names)]
        self._server.loaded = names
        self._on_change(sorted(names))

    def publish(self, without: ModelGroup | None = None) -> None:
        names = {name for one in self.loaded.values() if one != without for name in one.names}
        self._on_change(sorted(names.union(self._others)))
        self._main.run(self._write_health)

    def changing(self, models: Iterable[str]) -> AbstractContextManager[list[Process]]:
        return self._triton.changing(models)

    def load_model(self, name: str, config: str) -> None:
        self._server.api.load_model(name, config)

    def unload_models(self, names: Sequence[str], timeout_s: float) -> None:
        self._server.api.unload_models(names, timeout_s)
