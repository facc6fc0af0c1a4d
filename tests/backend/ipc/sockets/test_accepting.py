"""Connections are accepted again after file descriptors or threads ran out."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path

import pytest

from inflight.ipc.sockets.accepting import accept_connections


class Scarce:
    """A listener without file descriptors for the first attempts.

    Attributes:
        num_failures: attempts that failed.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.num_failures = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures < 2:
            self.num_failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def test_connections_wait_while_file_descriptors_are_short(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        client.connect(str(tmp_path / "socket"))
        served = threading.Event()

        def serve(sock: socket.socket) -> None:
            sock.close()
            served.set()

        scarce = Scarce(listener)
        thread = threading.Thread(target=accept_connections, args=(scarce, serve, "serve"))
        thread.start()
        assert served.wait(60)
        assert scarce.num_failures == 2
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        assert not thread.is_alive(), "a listener that is shut down ends it"


def test_a_connection_without_a_thread_is_closed_and_the_next_one_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        served = threading.Event()

        def serve(sock: socket.socket) -> None:
            sock.close()
            served.set()

        thread = threading.Thread(target=accept_connections, args=(listener, serve, "serve"))
        thread.start()
        start = threading.Thread.start

        def refuse(self: threading.Thread) -> None:
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for is_served in (False, True):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(60)
                client.connect(str(tmp_path / "socket"))
                assert served.wait(60) if is_served else client.recv(1) == b""
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        assert not thread.is_alive()
