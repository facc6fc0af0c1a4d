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
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(backlog)
    return listener
