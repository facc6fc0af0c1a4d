"""A process is not confused with a later one that gets the same pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from inflight.ipc import processes
from inflight.ipc.processes import Process, how_it_exited
from waiting import wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", "an argument"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(SLEEP)
    yield child
    child.kill()
    child.wait()


def found(pid: int) -> Process:
    process = Process.find(pid)
    assert process is not None
    return process


def test_a_process_runs_until_it_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = found(child.pid)
    assert process.is_running()
    process.kill()
    child.wait()
    assert not process.is_running()
    assert Process.find(child.pid) is None
    process.kill()  # of one that has gone: nothing


def test_a_zombie_process_counts_as_ended(child: subprocess.Popen[bytes]) -> None:
    process = found(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_running()


def test_another_one_of_the_same_number_is_not_it(child: subprocess.Popen[bytes]) -> None:
    former = Process(child.pid, "1")
    assert not former.is_running()
    former.kill()
    assert found(child.pid).is_running()


def test_children_and_their_arguments(child: subprocess.Popen[bytes]) -> None:
    assert found(child.pid) in Process.children_of(os.getpid())
    assert found(child.pid) not in Process.children_of(child.pid)
    # For a moment after its exec, a process has none.
    wait_until(lambda: found(child.pid).arguments()[-1:] == ["an argument"])
    child.kill()
    child.wait()
    assert Process(child.pid, "1").arguments() == []


@pytest.mark.parametrize(
    ("status", "text"),
    [(-9, "was killed by SIGKILL"), (-11, "was killed by SIGSEGV"), (1, "exited with status 1")],
)
def test_an_exit_is_told_in_words(status: int, text: str) -> None:
    assert how_it_exited(status) == text


def test_a_process_has_an_age(child: subprocess.Popen[bytes]) -> None:
    before = found(child.pid).age_s()
    assert -0.02 <= before < 60  # start times are in ticks of 10 ms
    assert found(child.pid).age_s() >= before
    assert found(os.getpid()).age_s() >= before


def test_processes_are_ordered_by_their_starts() -> None:
    first, second = Process(2, "99"), Process(1, "100")
    assert first.started_before(second)
    assert not second.started_before(first) and not first.started_before(first)


def test_a_process_of_another_user_or_container_is_not_our_own(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, uid = found(child.pid), os.getuid()
    assert process.is_own()
    for uids, pids, is_own in [
        ([uid, 0], [child.pid], True),
        ([uid + 1, uid], [child.pid], False),
        ([uid], [child.pid, 7], False),
    ]:
        status = {"Uid": [str(one) for one in uids], "NSpid": [str(one) for one in pids]}
        monkeypatch.setattr(processes, "_status", lambda pid, status=status: status)
        assert process.is_own() == is_own
    monkeypatch.undo()
    child.kill()
    child.wait()
    assert not process.is_own()
