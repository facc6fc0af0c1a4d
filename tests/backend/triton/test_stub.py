"""A stub identifies its server, even after it has exited."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight.ipc.processes import Process
from inflight.triton import stub
from waiting import wait_until


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["stub", "model.py", "region", "1048576", "1048576", "{parent}", "path"], None),
        (["stub", "model.py", "region", "{parent}"], None),  # as another Triton may have them
        (["stub", "model.py", "region", "1048576", "1048576", "4711", "path"], 4711),  # it has gone
        (["stub", "model.py", "region", "1048576", "1048576", "path"], None),
        (["pytest"], None),
    ],
)
def test_the_server_is_the_parent_unless_that_has_gone(
    arguments: list[str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getppid()
    given = [one.format(parent=parent) for one in arguments]
    monkeypatch.setattr(Process, "arguments", lambda process: given)
    assert stub.server_pid() == (parent if expected is None else expected)


def test_a_parent_is_found_by_a_real_command_line() -> None:
    code = "from inflight.triton.stub import server_pid; print(server_pid())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == os.getpid()


_SERVER = """
import subprocess, sys, time
stub = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
print(stub.pid, flush=True)
time.sleep(600)
"""
_STUB = """
import sys, time
from pathlib import Path
from inflight.ipc import shared_memory
from inflight.triton import stub
shared_memory.FOLDER = Path(sys.argv[1])
stub.SERVER_POLL_S, stub.EXIT_GRACE_S = 0.05, 0.2
stub.close_shared_memory()
stub.exit_with_server()
print("watches", flush=True)
time.sleep(600)
"""


def test_a_stub_does_not_outlive_its_server(tmp_path: Path) -> None:
    region, other = tmp_path / "triton_region", tmp_path / "other"
    for path in (region, other):
        path.touch(mode=0o644)
    command = [sys.executable, "-c", _SERVER, _STUB, str(tmp_path), region.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert server.stdout.readline() == "watches\n"
        assert stat.S_IMODE(region.stat().st_mode) == 0o600
        time.sleep(0.5)
        process = Process.find(pid)
        assert process is not None and region.exists(), "as long as the server runs"
        server.kill()
        server.wait()
        wait_until(lambda: not process.is_running())
    assert not region.exists() and other.exists()
