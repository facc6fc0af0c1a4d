"""The process in which Triton runs our models: one of its Python backend's stubs."""

from __future__ import annotations

import os

from inflight.ipc.processes import Process

# Of the stub's arguments, in Triton 2.51.
_SERVER_PID = 5


def server_pid() -> int:
    """Pid of the tritonserver that started this process.

    That is the parent, unless it has exited already; then the command line has it.
    """
    parent = os.getppid()
    this = Process.find(os.getpid())
    arguments = this.arguments() if this is not None else []
    if str(parent) in arguments or len(arguments) <= _SERVER_PID:
        return parent
    named = arguments[_SERVER_PID]
    return int(named) if named.isdigit() else parent
