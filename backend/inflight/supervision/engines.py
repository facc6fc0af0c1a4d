"""The engine processes of a supervised server."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from inflight.errors import CapacityError, ConfigError, InflightError
from inflight.ipc import engine_client
from inflight.ipc.engine_client import EngineClient
from inflight.ipc.frames import Loading
from inflight.ipc.heartbeat import Lateness, overdue_s
from inflight.ipc.owner import Owner
from inflight.ipc.processes import how_it_exited

# From its start to its first progress: Python and its modules.
START_S = 120.0
ATTACH_PAUSE_S = 0.1
EXIT_S = 2.0
# An engine that exits removes its socket first.
SOCKET_S = 1.0


class EngineChild:
    """The engine of one model, started by the supervisor, and its observer.

    Args:
        model: the model's folder.
        owner: the supervisor.
        log_file: for the engine's output; appended to.
        generation: 0, or the number of an engine that may be replaced by another one of the model;
            then fronts find it after `link`.
        config: its engine.json; None for that of the model's highest version.

    Attributes:
        on_progress: called with the progress of loading, on another thread.
    """

    def __init__(
        self,
        model: Path,
        owner: Owner,
        log_file: Path,
        *,
        generation: int = 0,
        config: Path | None = None,
    ) -> None:
        self.name = f"the engine of {model.name}"
        self.model = model
        self.generation = generation
        self.config = config or engine_client.engine_config_path(model)
        self.on_progress: Callable[[Loading], None] = lambda loading: None
        self._owner = owner
        self._log_file = log_file
        self._path = engine_client.socket_path(model, owner.pid, generation)
        self._link = engine_client.socket_path(model, owner.pid)
        self._is_linked = False
        self._process: subprocess.Popen[bytes] | None = None
        self._client: EngineClient | None = None
        self._load_failure = ""
        self._has_loaded = False  # since its start
        self._started_at = 0.0
        self._loading: Loading | None = None  # the last progress since its start
        self._socket_seen_at = 0.0
        self._lateness = Lateness()
        self._closing = threading.Event()

    @property
    def client(self) -> EngineClient | None:
        """The observer; None unless the engine has loaded and runs."""
        return self._client

    @property
    def why_unavailable(self) -> str:
        """Why it cannot take requests; empty if it can."""
        if self._client is not None:
            return ""
        return "does not respond" if self._has_loaded else "is loading"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        for path in (self._path, engine_client.heartbeat_path(self._path)):
            path.unlink(missing_ok=True)  # of the one before: it would look overdue
        self._load_failure = ""
        self._has_loaded = False
        self._started_at, self._loading = time.monotonic(), None
        with open(self._log_file, "ab") as output:
            self._process = engine_client.start_engine(
                self.model, self._owner, output, path=self._path, config=self.config
            )
        observer = threading.Thread(
            target=self._observe, args=(self._process,), name="observe", daemon=True
        )
        try:
            observer.start()
        except RuntimeError as error:
            raise CapacityError(f"the system refuses a thread ({error}); retry later") from None

    def link(self) -> None:
        """Have fronts that attach from now on find this engine."""
        if self.generation:
            new = self._path.with_suffix(".link")
            new.unlink(missing_ok=True)
            new.symlink_to(self._path)
            new.replace(self._link)
            self._is_linked = True

    def problem(self) -> str:
        process = self._process
        assert process is not None
        status = process.poll()
        if status is not None:
            return self._load_failure or how_it_exited(status)
        stalled = self.why_stalled()
        if stalled:
            return stalled
        if self._lateness.of(engine_client.heartbeat_path(self._path)):
            return "hangs: no progress within the time that a step may take"
        if self._path.exists():
            self._socket_seen_at = time.monotonic()
        elif self._client is not None and time.monotonic() - self._socket_seen_at > SOCKET_S:
            return "has lost its socket"  # fronts that start later could not attach
        if self._is_linked and not self._link.is_symlink():
            self.link()
        return ""

    def why_stalled(self) -> str:
        """Why its start takes too long; empty if it does not."""
        if self._has_loaded:
            return ""
        loading = self._loading
        if loading is None:
            is_late = time.monotonic() - self._started_at > START_S
            return f"has not begun to load within {START_S:.0f} s" if is_late else ""
        if not overdue_s(engine_client.heartbeat_path(self._path)):
            return ""
        where = f"{loading.what}, {loading.fraction:.0%}"
        return f"stopped loading: no progress within load_timeout_s ({where})"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it in order; kill it if that takes too long."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_S)
            self.kill()
        engine_client.heartbeat_path(self._path).unlink(missing_ok=True)

    def _note_progress(self, loading: Loading) -> None:
        self._loading = loading
        self.on_progress(loading)

    def _observe(self, process: subprocess.Popen[bytes]) -> None:
        while process.returncode is None and not self._closing.wait(ATTACH_PAUSE_S):
            lost = threading.Event()
            try:
                self._client = engine_client.attach(
                    self._path,
                    "observer",
                    on_lost=lost.set,
                    on_loading=self._note_progress,
                )
            except ConfigError as error:
                self._load_failure = f"cannot load: {error}"
                return
            except InflightError:
                continue  # it does not listen yet, or exited while loading
            self._has_loaded = True
            lost.wait()
            self._client.close()
            self._client = None
