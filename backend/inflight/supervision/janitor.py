"""Cleans up after a supervisor that was killed: `python -m inflight.supervision.janitor FOLDER`.

The kernel kills what the supervisor started itself. The stubs are tritonserver's: most notice that
it has exited, but one that was inside a call of Triton's metrics API waits for its answer for ever,
and holds the interpreter's lock while it does.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

from inflight.ipc.runtime_folder import clean_up
from inflight.ipc.shared_memory import stubs_of

# The stubs have so long to exit by themselves, which removes their shared memory, too.
GRACE_S = 3.0
POLL_S = 0.1


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the janitor of a server's runtime folder; it acts when this process has exited."""
    return subprocess.Popen(
        [sys.executable, "-m", "inflight.supervision.janitor", str(folder)],
        stdin=subprocess.PIPE,  # closed by the kernel when this process exits
        start_new_session=True,
    )


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    # A supervisor that stops in order leaves neither. Of one that was killed, an engine or another
    # server may have removed the folder by now.
    pid = int(folder.name)
    if folder.exists() or stubs_of(pid):
        deadline = time.monotonic() + GRACE_S
        time.sleep(POLL_S)  # the kernel kills the others just after it has closed the pipe
        while stubs_of(pid) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        clean_up(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
