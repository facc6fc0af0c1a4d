"""Orphans are adopted, reaped and, at the end, killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """\
import os, subprocess, sys, time
from inflight.supervision.orphans import adopt_orphans, kill_children, reap_orphans
from inflight.ipc.processes import Process

adopt_orphans()
child = "import subprocess, sys; to = subprocess.DEVNULL; "  # else `run` would wait for the orphan
child += "print(subprocess.Popen([sys.executable, '-c', {code!r}], stdout=to, stderr=to).pid)"
own = subprocess.Popen([sys.executable, "-c", ""])
made = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
orphan = int(made.stdout)
deadline = time.monotonic() + 60.0
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
{then}
while os.path.exists(f"/proc/{{orphan}}"):
    assert time.monotonic() < deadline, "it is still there"
    own.poll()
    reap_orphans({{own.pid}})
    time.sleep(0.02)
assert own.wait() == 0, "its status was not taken from its owner"
"""


@pytest.mark.parametrize(
    ("code", "then"),
    [
        ("import time; time.sleep(0.2)", ""),
        ("import time; time.sleep(600)", "kill_children()"),
    ],
    ids=["reaped", "killed"],
)
def test_an_orphan_does_not_stay(code: str, then: str) -> None:
    program = _PROGRAM.format(code=code, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
