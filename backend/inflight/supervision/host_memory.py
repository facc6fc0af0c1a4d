"""Host memory that is still available: of the machine, and of the server's control groups.

New requests are refused while it is short, before the kernel's OOM killer ends an engine with all
of its requests.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

INTERVAL_S = 0.5
# It is no longer short from so many times the minimum on.
RECOVERED = 1.25
MIB = 1 << 20
_MEMINFO = re.compile(r"(?m)^MemAvailable:\s+(\d+) kB$")
_INACTIVE_FILE = re.compile(r"(?m)^inactive_file (\d+)$")
_UNIFIED = re.compile(r"(?m)^0::(/.*)$")


class HostMemory:
    """Watches the available memory.

    Args:
        min_free_bytes: less is short; 0: it is never short.
        root: of the file system.
        clock: seconds, monotonic.

    Attributes:
        available_bytes: as read last; None if the system does not report it.
        shortage: the error that new requests get while memory is short; empty otherwise.
    """

    def __init__(
        self,
        min_free_bytes: int,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.available_bytes: int | None = None
        self.shortage = ""
        self._min_free_bytes = min_free_bytes
        self._meminfo = root / "proc/meminfo"
        self._groups = list(_control_groups(root))
        self._clock = clock
        self._read_at = float("-inf")

    def poll(self) -> bool:
        """Read it, unless that was done within `INTERVAL_S`; returns whether it was read."""
        now = self._clock()
        if now - self._read_at < INTERVAL_S:
            return False
        self._read_at = now
        self.available_bytes = found = self._read()
        enough = self._min_free_bytes * (RECOVERED if self.shortage else 1.0)
        if found is None or found >= enough:
            self.shortage = ""
        else:
            self.shortage = (
                f"the server is short of memory: {found // MIB} MiB are available, and it needs "
                f"{self._min_free_bytes // MIB} MiB; retry later"
            )
        return True

    def _read(self) -> int | None:
        found = [free for group in self._groups if (free := _free_of(group)) is not None]
        with contextlib.suppress(OSError):
            match = _MEMINFO.search(self._meminfo.read_text())
            if match is not None:
                found.append(int(match[1]) << 10)
        return min(found, default=None)


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's groups in cgroup v2, from the innermost one on."""
    with contextlib.suppress(OSError):
        match = _UNIFIED.search((root / "proc/self/cgroup").read_text())
        if match is not None:
            mounted = root / "sys/fs/cgroup"
            group = mounted / match[1].lstrip("/")
            yield from (one for one in (group, *group.parents) if one.is_relative_to(mounted))


def _free_of(group: Path) -> int | None:
    """Bytes below a group's limit, counting the file cache that the kernel drops first (as in
    Kubernetes' working set) as free; None without a limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        match = _INACTIVE_FILE.search((group / "memory.stat").read_text())
        return int(limit) - used + (int(match[1]) if match is not None else 0)
    except (OSError, ValueError):
        return None
