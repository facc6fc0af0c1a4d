"""The folder for sockets, locks and heartbeats: one per server, removed with it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from inflight.errors import ConfigError
from inflight.ipc.processes import Process
from inflight.ipc.shared_memory import kill_stubs_left_by, region_prefix, remove_regions


def folder_of(owner_pid: int) -> Path:
    """The folder of a server, created if missing; owner_pid: its supervisor or tritonserver.

    Raises:
        ConfigError: the runtime folder belongs to another user.
    """
    folder = _base() / str(owner_pid)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def server_folders() -> list[Path]:
    """The folders of the running servers of this user."""
    return [
        folder
        for folder in sorted(_base().iterdir())
        if folder.name.isdigit() and Process.find(int(folder.name)) is not None
    ]


def gpu_folder() -> Path:
    """The folder for what the engines of all servers of this user share about GPUs.

    Raises:
        ConfigError: the runtime folder belongs to another user.
    """
    folder = _base() / "gpus"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def remove_folder_of(owner_pid: int) -> None:
    shutil.rmtree(_base() / str(owner_pid), ignore_errors=True)


def remove_abandoned() -> None:
    """Clean up after the servers that have exited."""
    for folder in _base().iterdir():
        if folder.name.isdigit() and Process.find(int(folder.name)) is None:
            clean_up(folder)


def clean_up(folder: Path) -> int:
    """Kill the stubs that a server has left, and remove their shared memory and its folder; returns
    the number of the stubs."""
    pid = int(folder.name)
    num_killed = kill_stubs_left_by(pid)
    if Process.find(pid) is None:  # else the rest is that of another server, which has this pid now
        remove_regions(region_prefix(pid))
        shutil.rmtree(folder, ignore_errors=True)
    return num_killed


def _base() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base, "inflight") if base else Path("/tmp", f"inflight-{os.getuid()}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a folder of mode 0700 that belongs to user {os.getuid()}; "
            "remove it or set XDG_RUNTIME_DIR"
        )
    return directory
