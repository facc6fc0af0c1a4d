"""The process in which Triton runs our models: one of its Python backend's stubs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from inflight.ipc.heartbeat import beat_from_thread, write_stacks_on_request
from inflight.ipc.owner import SUPERVISOR, Owner
from inflight.ipc.processes import Process
from inflight.ipc.runtime_folder import folder_of
from inflight.ipc.shared_memory import regions_of, tritonserver_of

SERVER_POLL_S = 0.5
EXIT_GRACE_S = 3.0


def owner() -> Owner:
    """The owner of the engines that this process attaches to."""
    supervisor = os.environ.get(SUPERVISOR, "")
    if supervisor.isdigit():
        return Owner(int(supervisor), is_supervisor=True)
    return Owner(server_pid(), is_supervisor=False)


def start_heartbeat(owner: Owner) -> None:
    """Beat for the rest of this process's life, for a supervisor that replaces hung stubs, and asks
    them where they hang."""
    name = f"stub-{os.getpid()}"
    write_stacks_on_request(folder_of(owner.pid) / f"{name}.stacks")
    beat_from_thread(folder_of(owner.pid) / f"{name}.beat")


def close_shared_memory() -> None:
    """Let only this user read the memory that this process shares with Triton: it holds prompts and
    answers, and Triton makes it readable for all users."""
    for region in _own_regions():
        with contextlib.suppress(OSError):  # another Triton may place it elsewhere
            region.chmod(0o600)


def exit_with_server() -> None:
    """End this process some seconds after tritonserver has exited. Triton's own stub notices that
    within two seconds, but not always, and would then keep its memory.

    A thread inside Triton's metrics API may wait for the server with the interpreter's lock held:
    then this process is killed, by a janitor of the engine or supervisor.
    """
    server, regions = Process.find(server_pid()), _own_regions()

    def watch() -> None:
        while server is not None and server.is_running():
            time.sleep(SERVER_POLL_S)
        time.sleep(EXIT_GRACE_S)
        for region in regions:
            with contextlib.suppress(OSError):
                region.unlink()
        os._exit(1)

    threading.Thread(target=watch, name="server", daemon=True).start()


def _own_regions() -> list[Path]:
    this = Process.find(os.getpid())
    return regions_of(this) if this is not None else []


def server_pid() -> int:
    """Pid of the tritonserver that started this process.

    That is the parent, unless it has exited already; then the command line has it.
    """
    parent = os.getppid()
    this = Process.find(os.getpid())
    arguments = this.arguments() if this is not None else []
    if str(parent) in arguments:
        return parent
    return tritonserver_of(arguments) or parent
