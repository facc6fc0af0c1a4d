"""The memory that a stub shares with tritonserver: it holds prompts and answers."""

from __future__ import annotations

from pathlib import Path

from inflight.ipc.processes import Process

FOLDER = Path("/dev/shm")
_PREFIX = "triton_"
# Of a stub's arguments, in Triton 2.51.
_SERVER_PID = 5


def regions_of(stub: Process) -> list[Path]:
    """The regions of a stub, which are named on its command line; none if it has exited."""
    return [FOLDER / name for name in _region_names(stub.arguments())]


def region_prefix(server_pid: int) -> str:
    """What the names of all regions of a server begin with."""
    return f"{_PREFIX}inflight_shm_region_{server_pid}_"


def tritonserver_of(arguments: list[str]) -> int | None:
    """The pid of the tritonserver that started a stub with these arguments; None if they name
    none."""
    named = arguments[_SERVER_PID] if len(arguments) > _SERVER_PID else ""
    return int(named) if named.isdigit() else None


def stubs_left_by(server_pid: int) -> list[Process]:
    """The running stubs of a server that has exited, by their command lines: they need no server
    that remembers them, and no file.

    Only this user's, and only those older than the process that has this pid now, if any: else that
    is their server, whether it never exited or got the pid of one that did.

    Args:
        server_pid: of a supervisor, or of a tritonserver without one.
    """
    prefix = region_prefix(server_pid)
    stubs = [
        process
        for process in Process.all()
        if _is_stub_of(server_pid, prefix, process.arguments()) and process.is_own()
    ]
    now = Process.find(server_pid)  # after them, so that it is no successor of their server's
    return [stub for stub in stubs if now is None or stub.started_before(now)]


def kill_stubs_left_by(server_pid: int) -> int:
    """Kill them, remove their regions, and return their number. Several processes may do this at
    once."""
    num_killed = 0
    for stub in stubs_left_by(server_pid):
        regions = regions_of(stub)
        if stub.is_running():  # else another process may have its pid, and these be its regions
            for region in regions:
                region.unlink(missing_ok=True)
            stub.kill()
            num_killed += 1
    return num_killed


def remove_regions(prefix: str) -> None:
    """Remove those of stubs that have exited, also of stubs that were never seen."""
    for region in FOLDER.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _region_names(arguments: list[str]) -> list[str]:
    return [one for one in arguments if one.startswith(_PREFIX) and "/" not in one]


def _is_stub_of(server_pid: int, prefix: str, arguments: list[str]) -> bool:
    """Whether a process with these arguments is a stub of this server; prefix: of its regions, if
    it is a supervisor, which gives its tritonservers their names."""
    names = _region_names(arguments)
    if any(name.startswith(prefix) for name in names):
        return True
    return bool(names) and tritonserver_of(arguments) == server_pid
