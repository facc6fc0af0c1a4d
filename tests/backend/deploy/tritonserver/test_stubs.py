"""What a tritonserver leaves is found and ended, without a tritonserver."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inflight.deploy.tritonserver.stubs import Stubs
from inflight.ipc.shared_memory import region_prefix

SLEEP = (sys.executable, "-c", "import time; print(flush=True); time.sleep(60)")


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*SLEEP, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("form", ["{}1234", "--backend-config=python,shm-region-prefix-name={}"])
def test_a_stub_that_was_never_seen_is_ended(form: str) -> None:
    """With its own command line, or before its exec with that of tritonserver."""
    prefix = f"{region_prefix(os.getpid())}{uuid.uuid4().hex}_"
    other = f"{region_prefix(os.getpid())}{uuid.uuid4().hex}_"
    with running(form.format(prefix)) as left, running(form.format(other)) as foreign:
        stubs = Stubs()
        stubs.find_left(prefix)
        stubs.end(0.0)
        assert left.wait(5) < 0, "killed"
        assert foreign.poll() is None, "another server's"
