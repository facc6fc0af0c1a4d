"""The stubs of a tritonserver: the processes of its models."""

from __future__ import annotations

import time
from pathlib import Path

from inflight.ipc.processes import Process
from inflight.ipc.shared_memory import regions_of

KILLED_EXIT_S = 1.0


class Stubs:
    """The stubs that were seen.

    They are remembered for when tritonserver has exited: then they are no longer its children, and
    one that hangs would keep its memory forever.
    """

    def __init__(self) -> None:
        self._regions_of: dict[Process, list[Path]] = {}  # shared memory by stub

    def find(self, pid: int) -> list[Process]:
        """Those of the tritonserver with this pid, which are remembered."""
        found = Process.children_of(pid)
        for stub in found:
            regions = regions_of(stub)
            if regions or stub not in self._regions_of:  # none are seen before its exec
                self._regions_of[stub] = regions
        return found

    def find_left(self, region_prefix: str) -> None:
        """Remember those of a tritonserver that has exited, also what it started last and nobody
        saw: such a stub would go on to start, and create files that were removed.

        Args:
            region_prefix: of the server's regions. It is on the command lines of its stubs, and on
                its own, which a stub has before its exec.
        """
        for process in Process.all():
            if any(region_prefix in argument for argument in process.arguments()):
                self._regions_of.setdefault(process, regions_of(process))

    def forget_ended(self) -> list[Process]:
        """The remembered ones that have exited; they are forgotten, with their shared memory."""
        ended = [stub for stub in self._regions_of if not stub.is_running()]
        for stub in ended:
            for region in self._regions_of.pop(stub):
                region.unlink(missing_ok=True)
        return ended

    def end(self, patience_s: float) -> None:
        """Wait until all have exited, which they do without their server; kill those that hang."""
        stubs = list(self._regions_of)
        self._regions_of = {}
        _wait_for(stubs, patience_s)
        for stub in stubs:
            stub.kill()  # it would keep its memory forever
        _wait_for(stubs, KILLED_EXIT_S)


def _wait_for(processes: list[Process], seconds: float) -> None:
    """Wait until all of them have exited, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(one.is_running() for one in processes):
        time.sleep(0.05)
