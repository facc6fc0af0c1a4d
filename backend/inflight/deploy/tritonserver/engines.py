"""The engines of a server's models, as the process that supervises them sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from inflight.errors import CapacityError, InflightError
from inflight.ipc import engine_client
from inflight.ipc.frames import Loading


def attach_all(sockets: Mapping[str, Path]) -> dict[str, engine_client.EngineClient]:
    """Connections to the engines that run, by model.

    Args:
        sockets: of all engines, by model.
    """
    engines = {}
    for name, path in sockets.items():
        with contextlib.suppress(InflightError):  # not running: nothing in flight
            engines[name] = engine_client.attach(path, "observer", on_loading=_refuse)
    return engines


def num_in_flight(engine: engine_client.EngineClient) -> int:
    """Requests of an engine that have not ended."""
    stats = engine.stats()
    return stats.num_running + stats.num_waiting + stats.num_suspended


def end_engine(path: Path) -> None:
    """Terminate the engine that listens at `path`, which would otherwise wait for new fronts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, user, _ = struct.unpack("3i", credentials)
            if user == os.getuid():
                os.kill(pid, signal.SIGTERM)
        except OSError:
            pass  # already exited


def _refuse(loading: Loading) -> None:
    raise CapacityError("the engine is loading")
