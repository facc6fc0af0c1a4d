"""The socket over which `inflight model` controls a server's models."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from inflight.errors import EngineError, InflightError
from inflight.ipc import control
from inflight.ipc.control import Failed, ListModels, LoadModel, Models, ModelStatus, Progress
from inflight.ipc.sockets.accepting import accept_connections
from inflight.ipc.sockets.private_socket import listen
from inflight.supervision.models.model_control import ModelControl

logger = logging.getLogger("inflight.supervisor")

_TIMEOUT_S = 10.0  # for a client to send its request, or to read what it is sent

Operation = Callable[[], list[ModelStatus]]


class ControlSocket:
    """Serves one request per connection. Loads and unloads run one after another on one thread that
    lives as long as the server: the kernel ends a process with the thread that started it.

    Args:
        path: of the socket; only this user can open it.
        models: what requests change.
        server: the HTTP endpoint, by which clients choose a server.
    """

    def __init__(self, path: Path, models: ModelControl, server: str) -> None:
        self._models = models
        self._server = server
        self._operations: queue.SimpleQueue[tuple[Operation, Future[list[ModelStatus]]]] = (
            queue.SimpleQueue()
        )
        self._listener = listen(path, backlog=16)
        threading.Thread(target=self._operate, name="models", daemon=True).start()
        arguments = (self._listener, self._serve, "control")
        threading.Thread(
            target=accept_connections, args=arguments, name="control", daemon=True
        ).start()

    def close(self) -> None:
        """Accept no further requests."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(_TIMEOUT_S)
        with sock, contextlib.suppress(OSError):
            try:
                request = control.receive_request(sock)
                control.send(sock, Models(self._server, self._answer(request, sock)))
            except InflightError as error:
                control.send(sock, Failed(error.kind, str(error)))

    def _answer(self, request: control.Request, sock: socket.socket) -> list[ModelStatus]:
        if isinstance(request, ListModels):
            return self._models.status()
        name = control.check_name(request.name)

        def on_progress(progress: Progress) -> None:
            with contextlib.suppress(OSError):  # the client has left
                control.send(sock, progress)

        def operation() -> list[ModelStatus]:
            if isinstance(request, LoadModel):
                return self._models.load(name, request.settings, on_progress)
            return self._models.unload(name, on_progress)

        future: Future[list[ModelStatus]] = Future()
        self._operations.put((operation, future))
        return future.result()

    def _operate(self) -> None:
        while True:
            operation, future = self._operations.get()
            try:
                future.set_result(operation())
            except InflightError as error:
                future.set_exception(error)
            except Exception as error:
                logger.exception("a model could not be changed")
                reason = f"{type(error).__name__}; see the server's log"
                future.set_exception(EngineError(f"the request failed: {reason}"))
