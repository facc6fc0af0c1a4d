"""Processes of this machine, identified by pid and start time, as pids are reused."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PARENT, _START_TIME = 1, 19  # among the fields of `_stat`


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was seen running.

    Attributes:
        pid: its number.
        start_time: in clock ticks since the machine's start.
    """

    pid: int
    start_time: str

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The process with this pid; None if there is none, or it is a zombie."""
        fields = _stat(pid)
        return cls(pid, fields[_START_TIME]) if fields and fields[0] != "Z" else None

    @classmethod
    def all(cls) -> list[Process]:
        """All that run, zombies excluded."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [found for pid in pids if (found := cls.find(pid)) is not None]

    @classmethod
    def children_of(cls, pid: int) -> list[Process]:
        found = []
        for entry in Path("/proc").iterdir():
            fields = _stat(int(entry.name)) if entry.name.isdigit() else []
            if fields and fields[_PARENT] == str(pid):
                found.append(cls(int(entry.name), fields[_START_TIME]))
        return found

    def is_running(self) -> bool:
        return Process.find(self.pid) == self

    def started_before(self, other: Process) -> bool:
        return int(self.start_time) < int(other.start_time)

    def is_own(self) -> bool:
        """Whether it runs as this user, and not in a PID namespace below this one, as that of a
        container: the pids on its command line would be other ones here."""
        status = _status(self.pid)
        pids = status.get("NSpid", [])
        return status.get("Uid", [])[:1] == [str(os.getuid())] and len(pids) <= 1

    def age_s(self) -> float:
        """Seconds since its start."""
        started_s = int(self.start_time) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

    def arguments(self) -> list[str]:
        """Its command line; empty if it has ended."""
        try:
            text = Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace")
        except OSError:
            return []
        return text.split("\0")[:-1]

    def kill(self) -> None:
        """Kill it, if it is running."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of its parent that started it exits, even
    if this process is stopped or stuck. Exits at once if the parent has exited before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the starting process has exited")


def how_it_exited(status: int) -> str:
    """A process's exit in words; negative statuses are signals, as in subprocess."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (field 3 in proc(5)); [] if it has exited."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def _status(pid: int) -> dict[str, list[str]]:
    """The lines of /proc/PID/status by their names; empty if it has exited."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name: values.split() for name, _, values in lines}
