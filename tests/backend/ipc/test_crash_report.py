"""A process that crashes leaves a report; one that is killed or exits in order leaves none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, signal, sys
from pathlib import Path
from inflight.ipc.crash_report import CrashReport
report = CrashReport(Path(sys.argv[1]))
print(report.former, flush=True)
{what}
"""
RAISES = """
try:
    raise RuntimeError("the loop is broken")
except RuntimeError as error:
    report.write(error)
os._exit(1)
"""


def run(path: Path, what: str) -> tuple[int, str]:
    """The exit status, and the report of the process before."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(what=what), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("what", "status", "text"),
    [
        ("os.abort()", -signal.SIGABRT, "Aborted"),
        ("ctypes.string_at(0)", -signal.SIGSEGV, "Segmentation fault"),
        ("os.kill(os.getpid(), signal.SIGFPE)", -signal.SIGFPE, "Floating"),
        (RAISES, 1, "the loop is broken"),
    ],
)
def test_a_crash_is_reported_to_the_next_process(
    tmp_path: Path, what: str, status: int, text: str
) -> None:
    path = tmp_path / "report"
    assert run(path, what) == (status, "")
    assert text in path.read_text()
    _, former = run(path, "")
    assert text in former
    assert run(path, "") == (0, ""), "only the process before counts"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_no_report(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "report"
    assert run(path, f"os.kill(os.getpid(), {int(number)})") == (-number, "")
    assert path.read_text() == ""
