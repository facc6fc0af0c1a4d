"""The log file of a server and its models: written by several processes, of bounded size."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 64 << 20


def state_folder() -> Path:
    """Where a user's servers keep what outlives them; it may not exist yet."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base, "inflight")


def default_log_file(http_port: int) -> Path:
    return state_folder() / f"tritonserver-{http_port}.log"


def cap_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a file that has become too large to PATH.1, replacing that.

    The writers append and keep the file open, so it is copied and emptied: what they write in
    between is lost.
    """
    with contextlib.suppress(OSError):  # a full disk must not stop the server
        if path.stat().st_size > max_bytes:
            shutil.copyfile(path, path.with_name(path.name + ".1"))
            os.truncate(path, 0)
