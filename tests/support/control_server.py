"""A server that answers requests of `inflight model`."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from inflight.ipc import control
from inflight.ipc.control import Failed, Models, Progress


class FakeServer:
    """Answers each request with the same messages."""

    def __init__(self, path: Path, *messages: Progress | Models | Failed) -> None:
        self.requests: list[control.Request] = []
        self._messages = messages
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        try:
            while True:
                sock, _ = self._listener.accept()
                with sock:
                    self.requests.append(control.receive_request(sock))
                    for message in self._messages:
                        control.send(sock, message)
        except OSError:
            return
