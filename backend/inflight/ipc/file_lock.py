"""Exclusive locks between processes; the kernel releases them when their process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_S = 0.1


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is created if missing; waits while another process holds it.

    Args:
        path: of the file.
        on_wait: called several times a second while waiting.
    """
    with open(path, "a") as file:
        os.chmod(path, 0o600)
        if on_wait is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            while not _locked(file.fileno()):
                on_wait()
                time.sleep(_POLL_S)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
