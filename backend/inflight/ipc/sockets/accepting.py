"""A thread for each connection to a socket."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Of the process or the machine; they come back when connections are closed.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 0.1


def accept_connections(
    listener: socket.socket, serve: Callable[[socket.socket], None], name: str
) -> None:
    """Call `serve` with each connection, on a thread of this name, until the listener is closed.

    Without a free file descriptor, connections wait in the listener's queue; one for which no
    thread can be started is closed.
    """
    while True:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno not in _SHORTAGES:
                return
            time.sleep(_PAUSE_S)
            continue
        thread = threading.Thread(target=serve, args=(sock,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.error("a connection is closed: %s", error)
            sock.close()
            time.sleep(_PAUSE_S)
