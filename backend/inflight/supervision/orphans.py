"""Processes whose parent has exited, such as the stubs of a tritonserver that was killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Container

from inflight.ipc.processes import Process

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits, as the first process of a container
    is anyway."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: Container[int]) -> None:
    """Reap children that have exited, apart from those that others wait for; own: their pids."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in own:
                return  # its keeper reaps it soon
            os.waitpid(found.si_pid, 0)


def kill_children() -> None:
    """Kill the children that are left."""
    for child in Process.children_of(os.getpid()):
        child.kill()
