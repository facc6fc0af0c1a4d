"""Cleans up after a supervisor that was killed: `python -m inflight.supervision.janitor FOLDER`.

The kernel kills what the supervisor started itself. The stubs are tritonserver's: most notice that
it has exited, but one that was inside a call of Triton's metrics API waits for its answer for ever,
and holds the interpreter's lock while it does.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from inflight.ipc.processes import Process
from inflight.ipc.shared_memory import region_prefix, regions_of, remove_regions

# The stubs have so long to exit by themselves, which removes their shared memory, too.
GRACE_S = 3.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the janitor of a server's runtime folder; it acts when this process has exited."""
    return subprocess.Popen(
        [sys.executable, "-m", "inflight.supervision.janitor", str(folder)],
        stdin=subprocess.PIPE,  # closed by the kernel when this process exits
        start_new_session=True,
    )


def clean(folder: Path) -> None:
    """Kill the stubs that have a heartbeat in the folder, remove their shared memory and it."""
    for path in folder.glob("stub-*.beat"):
        stub = Process.find(int(path.stem.removeprefix("stub-")))
        regions = regions_of(stub) if stub is not None else []
        if stub is not None and regions:  # else another process has its pid now
            stub.kill()
            for region in regions:
                region.unlink(missing_ok=True)
    remove_regions(region_prefix(int(folder.name)))
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    if folder.exists():  # a supervisor that stops in order removes it
        time.sleep(GRACE_S)
        clean(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
