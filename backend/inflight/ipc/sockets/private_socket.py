"""Unix sockets that only this user can connect to."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def listen(path: Path, backlog: int) -> socket.socket:
    """A listener at `path`, in place of a file that is there.

    Raises:
        OSError: the socket cannot be created.
    """
    listener = _bind(path, socket.SOCK_STREAM)
    listener.listen(backlog)
    return listener


def receive(path: Path) -> socket.socket:
    """A socket for datagrams at `path`, in place of a file that is there.

    Raises:
        OSError: the socket cannot be created.
    """
    return _bind(path, socket.SOCK_DGRAM)


def _bind(path: Path, kind: int) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, kind)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        found.bind(str(path))
    except OSError:
        found.close()
        raise
    finally:
        os.umask(before)
    return found
