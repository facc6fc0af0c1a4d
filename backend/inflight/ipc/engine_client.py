"""Client side of the engine's IPC: find a model's engine, start it if missing, talk to it.

The socket's name is derived from the model's folder and the pid of the engine's owner, which is
`inflight serve` or, without it, tritonserver. So fronts, detokenizers and `serve` find the same
engine without configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from inflight.core.request import Request, TokenEvent
from inflight.engine.metrics.snapshot import Metrics
from inflight.engine.stats import Stats
from inflight.errors import CapacityError, ConfigError, EngineError, from_kind
from inflight.ipc.file_lock import file_lock
from inflight.ipc.frames import (
    PROTOCOL,
    STOPPING,
    Cancel,
    Connection,
    Delivered,
    Drain,
    Frame,
    GetMetrics,
    GetStats,
    Hello,
    LoadFailed,
    Loading,
    Refused,
    StepEvents,
    Submit,
    Welcome,
)
from inflight.ipc.owner import Owner
from inflight.ipc.processes import Process
from inflight.ipc.runtime_folder import folder_of
from inflight.sandbox.process import python_executable, start_process

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

START_TIMEOUT_S = 30.0
MAX_SOCKET_PATH = 107  # bytes, of Linux
STATS_TIMEOUT_S = 10.0
# Of engines that may be replaced, in turn.
GENERATIONS = (1, 2)
_MAX_REQUEST_ID = 2**63 - 1


def socket_path(model_directory: Path, owner_pid: int, generation: int = 0) -> Path:
    """The socket of the engine that this owner has for this model. Fronts attach to that of
    generation 0, which is a link if another one has replaced it.

    Raises:
        ConfigError: the runtime folder belongs to another user, or its path is too long.
    """
    name = hashlib.sha256(str(model_directory.resolve()).encode()).hexdigest()[:8]
    suffix = f"-{generation}" if generation else ""
    path = folder_of(owner_pid) / f"{name}{suffix}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket; allowed: {MAX_SOCKET_PATH} bytes: set "
            "XDG_RUNTIME_DIR to a shorter path"
        )
    return path


def heartbeat_path(socket: Path) -> Path:
    """Where the engine that listens on this socket has its heartbeat."""
    return socket.with_suffix(".beat")


def engine_config_path(model_directory: Path) -> Path:
    """The engine.json of a model's highest version.

    Raises:
        ConfigError: there is none.
    """
    versions = [p for p in model_directory.glob("*/engine.json") if p.parent.name.isdigit()]
    if not versions:
        raise ConfigError(
            f"{model_directory}/1/engine.json does not exist; "
            'the smallest one is {"model": "PATH"}'
        )
    return max(versions, key=lambda path: int(path.parent.name))


class EngineClient:
    """An attached engine. Methods may be called from any thread and never block on the engine,
    except `stats` and `metrics`.

    Attributes:
        welcome: the engine's properties.
    """

    def __init__(
        self,
        connection: Connection,
        welcome: Welcome,
        on_events: Callable[[list[TokenEvent]], None],
        on_lost: Callable[[], None],
        on_delivered: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        """Use `attach` or `attach_front`.

        Args:
            on_events: called on the reader thread with each step's events of this front.
            on_delivered: called there with what detokenizers delivered: (request_id, position).
            on_lost: called once, on the reader thread, when the engine has exited.

        Raises:
            CapacityError: this process cannot start its threads.
        """
        self.welcome = welcome
        self._connection = connection
        self._on_events = on_events
        self._on_lost = on_lost
        self._on_delivered = on_delivered
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._stats: queue.SimpleQueue[Stats | None] = queue.SimpleQueue()  # None: it has exited
        self._stats_lock = threading.Lock()
        self._metrics: queue.SimpleQueue[Metrics | None] = queue.SimpleQueue()
        self._metrics_lock = threading.Lock()
        self._closed = False
        try:
            threading.Thread(target=self._write, name="engine-write", daemon=True).start()
            threading.Thread(target=self._read, name="engine-read", daemon=True).start()
        except RuntimeError as error:
            self.close()
            raise CapacityError(f"the engine cannot be attached to: {error}; retry later") from None

    def new_request_id(self) -> int:
        """A random id, INT64 and never 0. Clients may send any id to the model `detokenizer`, which
        acknowledges and cancels requests by their ids: so no client can guess another's. The engine
        refuses an id that is in use.
        """
        return secrets.randbelow(_MAX_REQUEST_ID) + 1

    def submit(self, request: Request) -> None:
        self._outbox.put(Submit(request, time.monotonic()))

    def cancel(self, request_id: int) -> None:
        self._outbox.put(Cancel(request_id))

    def delivered(self, progress: list[tuple[int, int]]) -> None:
        self._outbox.put(Delivered(progress))

    def refused(self, counts: dict[str, int]) -> None:
        """This front has refused so many requests, by kind of error; only counted."""
        self._outbox.put(Refused(counts))

    def drain(self, reason: str = STOPPING) -> None:
        """Reject new requests from now on, for this reason; those in flight continue."""
        self._outbox.put(Drain(reason))

    def stats(self) -> Stats:
        """A snapshot, taken between two steps.

        Raises:
            EngineError: no answer came in time, or the engine has exited.
        """
        with self._stats_lock:
            return self._ask(GetStats(), self._stats)

    def metrics(self) -> Metrics:
        """What the engine has counted and measured, between two steps.

        Raises:
            EngineError: no answer came in time, or the engine has exited.
        """
        with self._metrics_lock:
            return self._ask(GetMetrics(), self._metrics)

    def close(self) -> None:
        self._closed = True
        self._outbox.put(None)
        self._connection.close()

    def _ask(self, question: Frame, answers: queue.SimpleQueue[Answer | None]) -> Answer:
        """The engine's answer; None among the answers: it has exited.

        Raises:
            EngineError: no answer came in time, or the engine has exited.
        """
        has_exited = False
        while not answers.empty():  # of a call that has timed out
            has_exited = answers.get() is None
        if not has_exited:
            self._outbox.put(question)
            try:
                found = answers.get(timeout=STATS_TIMEOUT_S)
            except queue.Empty:
                raise EngineError("the engine did not answer") from None
            if found is not None:
                return found
        answers.put(None)  # also for the next call
        raise EngineError("the engine has exited")

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader thread notices that the engine has exited
            while (frame := self._outbox.get()) is not None:
                self._connection.send(frame)

    def _read(self) -> None:
        try:
            while (frame := self._connection.receive()) is not None:
                match frame:
                    case StepEvents(events):
                        self._on_events(events)
                    case Delivered(progress):
                        self._on_delivered(progress)
                    case Stats():
                        self._stats.put(frame)
                    case Metrics():
                        self._metrics.put(frame)
                    case _:
                        logger.warning("unexpected %s frame", type(frame).__name__)
        except (OSError, ValueError) as error:
            if not self._closed:
                logger.error("the engine's connection broke: %s", type(error).__name__)
        finally:
            self._connection.close()
            self._outbox.put(None)  # ends the writer thread
            self._stats.put(None)
            self._metrics.put(None)
            if not self._closed:
                self._on_lost()


def engine_sockets(model_directory: Path, owner_pid: int) -> list[Path]:
    """The sockets of the model's engines: one, or two while one replaces the other."""
    only = socket_path(model_directory, owner_pid)
    if not only.is_symlink():
        return [only]
    paths = (socket_path(model_directory, owner_pid, generation) for generation in GENERATIONS)
    return [path for path in paths if path.exists()]


def attach(
    path: Path,
    role: str,
    on_events: Callable[[list[TokenEvent]], None] = lambda events: None,
    on_lost: Callable[[], None] = lambda: None,
    on_loading: Callable[[Loading], None] = lambda loading: None,
    on_delivered: Callable[[list[tuple[int, int]]], None] = lambda progress: None,
) -> EngineClient:
    """Attach to a running engine; waits while it loads.

    Args:
        path: of `socket_path`.
        role: `front`, `detokenizer` or `observer` (see wire.Hello).

    Raises:
        CapacityError: no engine is listening, or it was exiting and did not accept.
        EngineError: it exited while loading.
        ConfigError: it could not load, with the reason.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise CapacityError(f"no engine is listening ({error.strerror})") from None
    connection = Connection(sock)
    is_accepted = False
    try:
        with contextlib.suppress(OSError):
            connection.send(Hello(PROTOCOL, role, os.getpid()))
            for greeting in _greetings(connection):
                is_accepted = True
                match greeting:
                    case Loading():
                        on_loading(greeting)
                    case LoadFailed(kind, message):
                        raise from_kind(kind, message)
                    case Welcome():
                        return EngineClient(connection, greeting, on_events, on_lost, on_delivered)
        if not is_accepted:
            raise CapacityError("no engine is listening (it has exited)")
        raise EngineError("the engine exited while loading; see its log")
    except BaseException:  # re-raised; an interrupt must not leak the connection either
        connection.close()
        raise


def attach_front(
    model_directory: Path,
    owner: Owner,
    on_events: Callable[[list[TokenEvent]], None],
    on_lost: Callable[[], None],
    on_delivered: Callable[[list[tuple[int, int]]], None] = lambda progress: None,
) -> EngineClient:
    """Attach a front to the model's engine. A supervisor starts it; without one the first front
    does, and the others wait for that one.

    Raises:
        ConfigError: the engine could not load, with the reason.
        EngineError: it did not start or exited while loading, or the owner has exited.
    """
    if Process.find(owner.pid) is None:
        raise EngineError("the server has exited: it has no engine any more")
    path = socket_path(model_directory, owner.pid)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if owner.is_supervisor:
            _wait_until_it_listens(path)
        else:
            _start_unless_it_listens(model_directory, owner)
        try:
            return attach(path, "front", on_events, on_lost, on_delivered=on_delivered)
        except CapacityError as error:  # that engine was exiting: its successor is next
            if time.monotonic() > deadline:
                raise EngineError(f"the engine does not stay up: {error}") from None
            time.sleep(0.02)


def _start_unless_it_listens(model_directory: Path, owner: Owner) -> None:
    path = socket_path(model_directory, owner.pid)
    with file_lock(path.with_suffix(".lock")):
        if not _listens(path):
            process = start_engine(model_directory, owner)
            _wait_until_it_listens(path, process)
            # Reap it whenever it ends: a zombie would look like a running engine.
            threading.Thread(target=process.wait, name="engine-reaper", daemon=True).start()


def _greetings(connection: Connection) -> Iterator[Frame]:
    while (frame := connection.receive()) is not None:
        yield frame


def start_engine(
    model_directory: Path,
    owner: Owner,
    output: BinaryIO | None = None,
    *,
    path: Path | None = None,
    config: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start the engine process of a model.

    Args:
        output: for its log, by default this process's.
        path: of its socket, if not that of `socket_path`.
        config: its engine.json, if not that of `engine_config_path`.

    Raises:
        CapacityError: see `start_process`.
    """
    path = path or socket_path(model_directory, owner.pid)
    config = config or engine_config_path(model_directory)
    kind = "supervisor" if owner.is_supervisor else "tritonserver"
    return start_process(
        [
            *(python_executable(), "-m", "inflight.ipc.engine_main"),
            *(str(path), str(config), str(owner.pid), kind),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # Ctrl-C in the server's terminal is for the server, which drains.
        start_new_session=True,
    )


def _wait_until_it_listens(path: Path, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if _listens(path):
            return
        if process is not None and process.poll() is not None:
            raise EngineError(
                f"the engine exited with status {process.returncode} before it listened; "
                "see its log"
            )
        time.sleep(0.02)
    if process is not None:
        process.kill()
    raise EngineError(f"the engine did not listen within {START_TIMEOUT_S:.0f} s")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
