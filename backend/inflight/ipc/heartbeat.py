"""Heartbeats: a process states by when it will have made progress, and its supervisor checks.

The deadline is in a mapped file, so a beat costs no system call, and a process that is stopped or
whose threads are stuck cannot move it. Where they are stuck it writes to another file, if a signal
asks for that: the handler is in C and needs neither memory nor the interpreter's lock, which may be
what threads wait for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import struct
import threading
import time
from pathlib import Path

from inflight.core.mapped_file import map_file
from inflight.ipc.processes import Process

logger = logging.getLogger(__name__)

# Of a process that beats regardless of its work.
INTERVAL_S = 0.5
PATIENCE_S = 3.5
_DEADLINE = struct.Struct("=d")

STACKS_SIGNAL = signal.SIGUSR2
STACKS_WAIT_S = 0.5
_STACKS_POLL_S = 0.02


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


class Lateness:
    """How late beats are, as a supervisor judges that.

    After the whole machine has stood still, or had far too much to do, the supervisor may run
    before those that it watches, and all of them look late. So one that is late is given the time
    of a beat more, from the check that first finds it late.
    """

    def __init__(self) -> None:
        self._found_at: dict[Path, float] = {}

    def of(self, path: Path) -> float:
        """`overdue_s`, but 0 for INTERVAL_S after the first check that finds it late."""
        late_s, now = overdue_s(path), time.monotonic()
        if not late_s:
            self._found_at.pop(path, None)
            return 0.0
        return late_s if now - self._found_at.setdefault(path, now) >= INTERVAL_S else 0.0


def write_stacks_on_request(path: Path) -> None:
    """For the rest of this process's life.

    Args:
        path: of the file; replaced. If it cannot be written, which is logged, requests are ignored.
    """
    try:
        file = open(path, "w")  # stays open: the handler writes to it  # noqa: SIM115
    except OSError as error:
        logger.error("%s cannot be written, and is not used: %s", path.name, error.strerror)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        return
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


def stacks_of(process: Process, path: Path) -> list[str]:
    """The stacks of a process's threads, line by line, of one that has called
    `write_stacks_on_request`; empty if it is stopped, or writes none within STACKS_WAIT_S."""
    if not path.exists() or not process.is_running():
        return []  # the signal would end it
    before = _size(path)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, STACKS_SIGNAL)
    ends_at = time.monotonic() + STACKS_WAIT_S
    found = before
    while time.monotonic() < ends_at:
        time.sleep(_STACKS_POLL_S)
        size = _size(path)
        if size > before and size == found:
            break  # it has written all
        found = size
    with contextlib.suppress(OSError):
        return path.read_bytes()[before:].decode(errors="replace").splitlines()
    return []


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
