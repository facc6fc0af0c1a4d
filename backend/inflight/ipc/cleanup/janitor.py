"""Cleans up after a server that was killed: `python -m inflight.ipc.cleanup.janitor FOLDER`.

The kernel kills what a supervisor started itself, and an engine exits with its server. The stubs
are tritonserver's: most notice that it has exited, but one that was inside a call of Triton's
metrics API waits for its answer with the interpreter's lock held, and has to be killed.

A supervisor starts a janitor when it starts. Without one, an engine does when its tritonserver has
exited: it must free the GPU's memory at once, and so cannot wait for the stubs itself.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

from inflight import log
from inflight.ipc.processes import Process
from inflight.ipc.runtime_folder import clean_up
from inflight.ipc.shared_memory import stubs_left_by

logger = logging.getLogger("inflight.janitor")

# The stubs have so long to exit by themselves, which removes their shared memory, too. They take
# SERVER_POLL_S and EXIT_GRACE_S of `inflight.triton.stub`.
GRACE_S = 4.5
POLL_S = 0.1


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the janitor of a server's runtime folder; it acts when this process has exited."""
    return subprocess.Popen(
        [sys.executable, "-m", "inflight.ipc.cleanup.janitor", str(folder)],
        stdin=subprocess.PIPE,  # closed by the kernel when this process exits
        start_new_session=True,
    )


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    log.begin()
    pid = int(folder.name)
    server = Process.find(pid)
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    # A supervisor that stops in order leaves neither. Of a server that was killed, an engine or
    # another server may have removed the folder by now.
    if folder.exists() or stubs_left_by(pid):
        deadline = time.monotonic() + GRACE_S
        time.sleep(POLL_S)  # the kernel kills the others just after it has closed the pipe
        while time.monotonic() < deadline and (_is_running(server) or stubs_left_by(pid)):
            time.sleep(POLL_S)
        if num_killed := clean_up(folder):
            logger.warning("killed %d of the models' processes, left by a server", num_killed)


def _is_running(process: Process | None) -> bool:
    return process is not None and process.is_running()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
