"""The health of a server, which its supervisor writes to a file and its doors read."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec

from inflight.ipc.processes import Process
from inflight.ipc.runtime_folder import server_folders

HEALTH_FILE = "health.json"
"""Its name in a server's runtime folder."""
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
        endpoints: host:port of `http`, `grpc`, `metrics`, `engine_metrics` and `gateway`.
        written_at: in time.monotonic(), which all processes of a machine share.
    """

    is_live: bool
    is_ready: bool
    reason: str = ""
    models: list[str] = []
    versions: dict[str, list[int]] = {}
    endpoints: dict[str, str] = {}
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


def of_servers() -> dict[int, Health]:
    """The health of each running server of this user by its pid; `UNKNOWN` for a supervisor that
    hangs, and for a tritonserver without one."""
    return {
        int(folder.name): read(folder / HEALTH_FILE)
        for folder in server_folders()
        if (folder / HEALTH_FILE).exists() or _is_tritonserver(int(folder.name))
    }


def _is_tritonserver(pid: int) -> bool:
    """Whether it runs; an abandoned folder may have the pid of any process."""
    process = Process.find(pid)
    return process is not None and "tritonserver" in "".join(process.arguments()[:1])
