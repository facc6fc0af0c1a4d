"""The memory that a stub shares with tritonserver: it holds prompts and answers."""

from __future__ import annotations

from pathlib import Path

from inflight.ipc.processes import Process

FOLDER = Path("/dev/shm")
_PREFIX = "triton_"


def regions_of(stub: Process) -> list[Path]:
    """The regions of a stub, which are named on its command line; none if it has exited."""
    return [
        FOLDER / argument
        for argument in stub.arguments()
        if argument.startswith(_PREFIX) and "/" not in argument
    ]


def region_prefix(server_pid: int) -> str:
    """What the names of all regions of a server begin with."""
    return f"{_PREFIX}inflight_shm_region_{server_pid}_"


def stubs_of(server_pid: int) -> list[Process]:
    """The running stubs of a server, by the regions on their command lines: they need no server
    that remembers them, and no file."""
    prefix = region_prefix(server_pid)
    return [
        process
        for process in Process.all()
        if any(argument.startswith(prefix) for argument in process.arguments())
    ]


def remove_regions(prefix: str) -> None:
    """Remove those of stubs that have exited, also of stubs that were never seen."""
    for region in FOLDER.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
