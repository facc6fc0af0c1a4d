"""A stub identifies its server, even after it has exited."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inflight.ipc.processes import Process
from inflight.triton import stub


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
