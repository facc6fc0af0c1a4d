"""Waiting for a condition on a machine of any speed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

# Far more than anything takes, even on a busy machine: only a failure waits so long.
PATIENCE_S = 60.0
_POLL_S = 0.02

T = TypeVar("T")


def wait_until(what: Callable[[], T], about: object = "it did not happen") -> T:
    """The first true value of `what`.

    Args:
        about: the message of the failure; a callable is called for it.

    Raises:
        AssertionError: there is none within `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while not (found := what()):
        if time.monotonic() > until:
            raise AssertionError(about() if callable(about) else about)
        time.sleep(_POLL_S)
    return found


def wait_until_ended(processes: Iterable[psutil.Process]) -> None:
    """Until none of them runs. Orphans may stay as zombies: it is up to the first process of the
    machine when it takes their status, which can be after seconds, or never in a container.

    Raises:
        AssertionError: some still run after `PATIENCE_S`.
    """
    running = list(processes)

    def all_ended() -> bool:
        running[:] = [process for process in running if _is_running(process)]
        return not running

    wait_until(all_ended, lambda: running)


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def has_arguments(pid: int, *arguments: str) -> bool:
    """Whether these are a process's last ones: at first it has those of the process that started
    it, and for a moment after its exec none."""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        return found[-len(arguments) :] == [*arguments]
    return False
