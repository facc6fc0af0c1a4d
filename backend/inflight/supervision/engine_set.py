"""The engines of a server while models come and go."""

from __future__ import annotations

from pathlib import Path

from inflight.ipc.engine_client import GENERATIONS
from inflight.ipc.owner import Owner
from inflight.supervision.engines import EngineChild
from inflight.supervision.keeper import Keeper


class EngineSet:
    """The engines that serve, one per model and each with its keeper, and those that are about to
    serve or to end. Only the supervisor's main thread changes it.

    Args:
        owner: the supervisor.
        log_file: for the engines' output.
        are_replaced: whether an engine may be replaced by another one of its model; then fronts
            find each engine through a link.
    """

    def __init__(self, owner: Owner, log_file: Path, *, are_replaced: bool = False) -> None:
        self._are_replaced = are_replaced
        self._owner = owner
        self._log_file = log_file
        self._keepers: dict[Path, tuple[EngineChild, Keeper]] = {}
        self._others: list[EngineChild] = []

    @property
    def serving(self) -> list[EngineChild]:
        return [engine for engine, _ in list(self._keepers.values())]

    @property
    def keepers(self) -> list[Keeper]:
        return [keeper for _, keeper in list(self._keepers.values())]

    @property
    def pids(self) -> set[int]:
        return {engine.pid for engine in (*self.serving, *self._others)}

    def of(self, model: Path) -> EngineChild | None:
        """The engine that serves a model, by its folder."""
        found = self._keepers.get(model)
        return found[0] if found is not None else None

    def add(self, model: Path) -> None:
        """An engine that is started with the server."""
        generation = GENERATIONS[0] if self._are_replaced else 0
        engine = EngineChild(model, self._owner, self._log_file, generation=generation)
        engine.link()
        self._keepers[model] = engine, Keeper(engine)

    def start(self, model: Path, config: Path) -> EngineChild:
        """Start an engine for a model, beside the one that serves it; it is not restarted yet.

        Args:
            config: its engine.json.
        """
        before = self.of(model)
        first, second = GENERATIONS
        generation = second if before is not None and before.generation == first else first
        engine = EngineChild(
            model, self._owner, self._log_file, generation=generation, config=config
        )
        self._others.append(engine)
        engine.start()
        return engine

    def serve(self, engine: EngineChild) -> EngineChild | None:
        """Have a started engine serve its model and be restarted when it fails; returns the one
        that did before, which is not restarted any more."""
        before = self._keepers.get(engine.model)
        engine.link()
        self._others.remove(engine)
        self._keepers[engine.model] = engine, Keeper(engine)
        if before is None:
            return None
        self._others.append(before[0])
        return before[0]

    def retire(self, engine: EngineChild) -> None:
        """Do not restart an engine any more; it may still finish requests."""
        if self.of(engine.model) is engine:
            del self._keepers[engine.model]
            self._others.append(engine)

    def forget(self, engine: EngineChild) -> None:
        """An engine that did not serve has ended."""
        self._others.remove(engine)

    def end_all(self) -> None:
        for engine in (*self.serving, *self._others):
            engine.close()

    def kill_all(self) -> None:
        for keeper in self.keepers:
            keeper.stop()
        for engine in self._others:
            engine.kill()
