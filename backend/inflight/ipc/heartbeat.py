"""Heartbeats: a process states by when it will have made progress, and its supervisor checks.

The deadline is in a mapped file, so a beat costs no system call, and a process that is stopped or
whose threads are stuck cannot move it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from pathlib import Path

from inflight.core.mapped_file import map_file

# Of a process that beats regardless of its work.
INTERVAL_S = 0.5
PATIENCE_S = 3.5
_DEADLINE = struct.Struct("=d")


class Heartbeat:
    """The writer's side.

    Args:
        path: of the file; created or replaced. If the disk is full, the process continues, and a
            hang is not detected.
    """

    def __init__(self, path: Path) -> None:
        self._deadline = memoryview(map_file(path, _DEADLINE.size)).cast("d")
        self._deadline[0] = 0.0

    def beat(self, patience_s: float) -> None:
        """Promise another beat within `patience_s` seconds."""
        self._deadline[0] = time.monotonic() + patience_s


def beat_from_thread(path: Path) -> None:
    """Beat for the rest of this process's life, as long as any of its threads can run."""
    heartbeat = Heartbeat(path)

    def beat() -> None:
        while True:
            heartbeat.beat(PATIENCE_S)
            time.sleep(INTERVAL_S)

    heartbeat.beat(PATIENCE_S)
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


async def beat_from_loop(path: Path) -> None:
    """Beat until cancelled, as long as the event loop turns."""
    import asyncio  # Triton's stubs beat from threads, and it takes 20 ms to import

    heartbeat = Heartbeat(path)
    while True:
        heartbeat.beat(PATIENCE_S)
        await asyncio.sleep(INTERVAL_S)


def overdue_s(path: Path) -> float:
    """Seconds since the promised beat; 0 if it is not due, or if there is no heartbeat."""
    with contextlib.suppress(OSError, struct.error):
        (deadline,) = _DEADLINE.unpack(path.read_bytes())
        if deadline:
            return float(max(0.0, time.monotonic() - deadline))
    return 0.0
