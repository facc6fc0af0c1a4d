"""tritonserver as a supervised child: it, and its stubs, must make progress.

Triton 2.51 never restarts a stub, keeps reporting that it is ready without one, and aborts when a
stub that was stopped continues. So any problem of a stub is one of the whole server.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.deploy.tritonserver.server import Server
from inflight.ipc.heartbeat import Lateness, stacks_of
from inflight.ipc.owner import Owner
from inflight.ipc.processes import Process, how_it_exited
from inflight.ipc.runtime_folder import folder_of

logger = logging.getLogger("inflight.supervisor")

# Of a stub's arguments, in Triton 2.51.
_MODEL_PATH, _INSTANCE = 1, 8

PROBE_INTERVAL_S = 0.25
# tritonserver answers a probe within milliseconds, under any load that was measured.
SILENCE_S = 4.0


@dataclass(frozen=True, slots=True)
class _Watched:
    """What is checked; replaced as a whole, as two threads read it.

    Attributes:
        stubs: with their models.
        changing: models whose stubs may end.
    """

    stubs: Mapping[Process, str]
    changing: frozenset[str] = frozenset()


class TritonChild:
    """Starts tritonserver, probes it, and ends it with its stubs.

    Args:
        server: to start.
        owner: the supervisor; in its folder are the stubs' heartbeats and, if asked for, stacks.
    """

    name = "tritonserver"

    def __init__(self, server: Server, owner: Owner) -> None:
        self.server = server
        self._owner = owner
        self._watched = _Watched({})
        self._lateness = Lateness()
        self._lock = threading.Lock()  # held while `_watched` is replaced
        self._is_ready = False
        self._answered_at: float | None = None  # None until it was ready once
        self._probes_now = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._probe, name="probe", daemon=True).start()

    @property
    def pid(self) -> int:
        return self.server.pid

    @property
    def is_ready(self) -> bool:
        """Whether it answered the last probe, with all models loaded."""
        return self._is_ready

    def start(self) -> None:
        self._is_ready, self._answered_at = False, None
        self._lateness = Lateness()
        with self._lock:
            self._watched = replace(self._watched, stubs={})
        self.server.start()

    def problem(self) -> str:
        status = self.server.exit_status()
        if status is not None:
            if self._answered_at is None and self.server.lacks_shared_memory():
                return "cannot start: there is too little shared memory for the models' processes"
            return how_it_exited(status)
        answered_at = self._answered_at
        if answered_at is None:
            return ""  # it loads; what fails to load ends it
        watched = self._watched
        for stub, model in watched.stubs.items():
            if model in watched.changing:
                continue
            if not stub.is_running():
                return "lost a model's process"
            late_s = self._lateness.of(self._file_of(stub, "beat"))
            if late_s:
                self._log_stacks(stub, model)
                return (
                    f"has a process that hangs, of the model {model}: a beat is {late_s:.1f} s late"
                )
        silence = time.monotonic() - answered_at
        return f"has not answered for {silence:.1f} s" if silence > SILENCE_S else ""

    @contextlib.contextmanager
    def changing(self, models: Iterable[str]) -> Iterator[list[Process]]:
        """Their stubs may end and start within the `with` block; yields those that run now."""
        with self._lock:
            watched = self._watched = replace(self._watched, changing=frozenset(models))
        try:
            yield [stub for stub, model in watched.stubs.items() if model in watched.changing]
        finally:
            with self._lock:
                is_restarting = not self._watched.stubs
                self._watched = _Watched({} if is_restarting else self._find_stubs())
            for stub in self.server.forget_stubs():
                for path in folder_of(self._owner.pid).glob(f"stub-{stub.pid}.*"):
                    path.unlink(missing_ok=True)

    def _find_stubs(self) -> dict[Process, str]:
        """The stubs, with their models. Those of models that are unloaded or replaced are left out:
        they exit when their requests have ended."""
        loaded = self.server.loaded
        newest: dict[tuple[str, str], Process] = {}
        for stub in sorted(self.server.stubs(), key=lambda one: int(one.start_time)):
            model, instance = _model_of(stub)
            if model and (loaded is None or model in loaded):
                newest[model, instance] = stub
        return {stub: model for (model, _), stub in newest.items()}

    def _log_stacks(self, stub: Process, model: str) -> None:
        """Where it hangs; a record is one line."""
        lines = stacks_of(stub, self._file_of(stub, "stacks"))
        for line in lines or ["it is stopped, or no thread of it runs"]:
            logger.error("%s: %s", model, line)

    def _file_of(self, stub: Process, suffix: str) -> Path:
        return folder_of(self._owner.pid) / f"stub-{stub.pid}.{suffix}"

    def kill(self) -> None:
        self._is_ready = False
        self.server.kill()

    def close(self) -> None:
        """Stop probing."""
        self._is_closed = True
        self._probes_now.set()

    def probe_now(self) -> None:
        """Do not wait for the next probe; it is made on another thread."""
        self._probes_now.set()

    def _probe(self) -> None:
        while True:
            self._probes_now.wait(PROBE_INTERVAL_S)
            self._probes_now.clear()
            if self._is_closed:
                return
            if not self.server.is_running():
                continue
            status = self.server.api.probe()
            if self._answered_at is None:
                self.server.stubs()  # it remembers them, for when tritonserver is killed
            if not status:
                self._is_ready = False
                continue
            if status == 200 and not self._watched.stubs:
                with self._lock:
                    self._watched = replace(self._watched, stubs=self._find_stubs())
            self._is_ready = status == 200
            if self._is_ready or self._answered_at is not None:
                self._answered_at = time.monotonic()


def _model_of(stub: Process) -> tuple[str, str]:
    """The names of a stub's model and instance; empty if it has exited."""
    arguments = stub.arguments()
    if len(arguments) <= _INSTANCE:
        return "", ""
    # REPOSITORY/MODEL/VERSION/model.py
    return Path(arguments[_MODEL_PATH]).parent.parent.name, arguments[_INSTANCE]
