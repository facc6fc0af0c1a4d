"""A listener for this user alone."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from inflight.ipc.sockets.private_socket import listen


def test_a_listener_takes_the_place_of_a_former_one_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen(path, backlog=1) as former, listen(path, backlog=1) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            listener.accept()[0].close()
        former.setblocking(False)
        with pytest.raises(BlockingIOError):
            former.accept()
