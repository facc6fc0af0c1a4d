"""A process that makes no progress is noticed, even if it is stopped, and says where it hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inflight.ipc import heartbeat as heartbeats
from inflight.ipc.heartbeat import Heartbeat, overdue_s, stacks_of, write_stacks_on_request
from inflight.ipc.processes import Process
from waiting import wait_until


def test_a_beat_in_time_is_not_overdue(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.beat(60.0)
    assert overdue_s(tmp_path / "beat") == 0.0


def test_a_missed_beat_is_overdue(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    heartbeat.beat(-2.0)
    assert 2.0 <= overdue_s(tmp_path / "beat") < 10.0
    heartbeat.beat(60.0)
    assert overdue_s(tmp_path / "beat") == 0.0, "it has recovered"


def test_without_a_beat_nothing_is_due(tmp_path: Path) -> None:
    assert overdue_s(tmp_path / "missing") == 0.0
    (tmp_path / "empty").touch()
    assert overdue_s(tmp_path / "empty") == 0.0
    Heartbeat(tmp_path / "new")
    assert overdue_s(tmp_path / "new") == 0.0


def test_a_stopped_process_becomes_overdue(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from inflight.ipc.heartbeat import Heartbeat\n"
        "heartbeat = Heartbeat(Path(sys.argv[1]))\n"
        "while True: heartbeat.beat(0.5); print(flush=True); time.sleep(0.05)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: overdue_s(path) == 0.0)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: overdue_s(path) > 0.0)
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_looks_late_is_given_the_time_of_a_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor may be the first to run after the machine stood still."""
    path = tmp_path / "beat"
    heartbeat, lateness = Heartbeat(path), heartbeats.Lateness()
    now = time.monotonic()
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now)
    heartbeat.beat(1.0)
    assert lateness.of(path) == 0.0
    now += 60.0
    assert lateness.of(path) == 0.0, "all have stood still"
    now += heartbeats.INTERVAL_S / 2
    heartbeat.beat(1.0)
    assert lateness.of(path) == 0.0, "it goes on"
    now += 2.0
    assert lateness.of(path) == 0.0
    now += heartbeats.INTERVAL_S - 0.01
    assert lateness.of(path) == 0.0
    now += 0.01
    assert lateness.of(path) == pytest.approx(1.0 + heartbeats.INTERVAL_S)
    path.unlink()
    assert lateness.of(path) == 0.0, "of one that starts again"


def test_a_beat_costs_about_a_microsecond(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    found_s = []
    for _ in range(5):
        started = time.thread_time()
        for _ in range(10_000):
            heartbeat.beat(1.0)
        found_s.append((time.thread_time() - started) / 10_000)
        if found_s[-1] < 20e-6:
            break
    assert min(found_s) < 20e-6


# The second thread never gets the interpreter's lock back: what the first does is one call in C.
_PROGRAM = """
import sys, threading, time
from pathlib import Path
from inflight.ipc.heartbeat import write_stacks_on_request

def waits():
    time.sleep(600.0)

def holds_the_lock():
    print(flush=True)
    sum(range(10**12))

write_stacks_on_request(Path(sys.argv[1]))
threading.Thread(target=waits, daemon=True).start()
holds_the_lock()
"""


@contextmanager
def running(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def _process(child: subprocess.Popen[bytes]) -> Process:
    found = Process.find(child.pid)
    assert found is not None
    return found


def test_all_threads_are_found_while_one_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with running(path) as child:
        for _ in range(2):  # each time those of now
            found = stacks_of(_process(child), path)
            text = "\n".join(found)
            assert "in holds_the_lock" in text
            assert "in waits" in text
            assert sum("most recent call first" in line for line in found) == 2
        assert child.poll() is None, "it goes on"


def test_a_stopped_process_says_nothing_in_time(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with running(path) as child:
        child.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert stacks_of(_process(child), path) == []
        assert time.monotonic() - started < heartbeats.STACKS_WAIT_S + 1.0


def test_a_process_that_writes_none_is_not_signalled(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert stacks_of(_process(child), tmp_path / "missing") == []
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


def test_a_process_that_cannot_write_ignores_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(heartbeats.STACKS_SIGNAL)
    try:
        write_stacks_on_request(tmp_path / "missing" / "stacks")
        assert signal.getsignal(heartbeats.STACKS_SIGNAL) == signal.SIG_IGN
        assert "stacks cannot be written" in caplog.text
    finally:
        signal.signal(heartbeats.STACKS_SIGNAL, before)
