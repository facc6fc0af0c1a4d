"""Processes with the command lines of a tritonserver's stubs, which wait until they are killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from waiting import has_arguments, wait_until

# Pids above the largest that the kernel assigns, so no process has them. Tests that run at the same
# time have others, and do not end each other's stubs.
EXITED = 2**22 + 16 * os.getpid()
ANOTHER = int(f"{EXITED}2")
ENDS_BY_ITSELF = "import time; time.sleep(1)"
_HANGS = "import time; time.sleep(600)"


@contextlib.contextmanager
def running_stub(
    region: str, tritonserver: int = ANOTHER, code: str = _HANGS
) -> Iterator[subprocess.Popen[bytes]]:
    """One with this region of shared memory, of the tritonserver with this pid."""
    arguments = [region, "1048576", str(tritonserver), "path"]
    # As the stub's own: its server's pid is the fifth after the program.
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    try:
        wait_until(lambda: has_arguments(process.pid, *arguments))
        yield process
    finally:
        process.kill()
        process.wait()
