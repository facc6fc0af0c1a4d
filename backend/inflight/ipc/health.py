"""The health of a server, which its supervisor writes to a file and its doors read."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec

# A supervisor writes it several times a second; an older one is that of a hung or dead supervisor.
MAX_AGE_S = 3.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The response to liveness and readiness probes.

    Attributes:
        is_live: false if only a restart from outside can help.
        is_ready: all models are loaded, and the server neither drains nor is broken.
        reason: why it is not ready; empty if it is.
        models: names of the models that are ready, as clients use them.
        versions: of models that have several, those that are loaded, in ascending order.
        written_at: in time.monotonic(), which all processes of a machine share.
    """

    is_live: bool
    is_ready: bool
    reason: str = ""
    models: list[str] = []
    versions: dict[str, list[int]] = {}
    written_at: float = 0.0


UNKNOWN = Health(is_live=False, is_ready=False, reason="the supervisor does not answer")


def write(path: Path, health: Health) -> None:
    """Replace the file at once: a reader sees the former health or this one.

    Raises:
        OSError: it cannot be written.
    """
    stamped = msgspec.structs.replace(health, written_at=time.monotonic())
    data = msgspec.json.encode(stamped)
    new = path.with_suffix(f".{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError:
        _overwrite(path, data)


def _overwrite(path: Path, data: bytes) -> None:
    """Use the space of the former health: a full disk has none for another file."""
    with open(path, "r+b", buffering=0) as file:
        padded = data.ljust(os.fstat(file.fileno()).st_size)  # JSON may end with spaces
        if file.write(padded) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read(path: Path) -> Health:
    """The current health; `UNKNOWN` if there is none, or none that is recent."""
    try:
        health = msgspec.json.decode(path.read_bytes(), type=Health)
    except (OSError, msgspec.DecodeError):
        return UNKNOWN
    return health if time.monotonic() - health.written_at < MAX_AGE_S else UNKNOWN
