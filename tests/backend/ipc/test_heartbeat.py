"""A process that makes no progress is noticed, even if it is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from inflight.ipc.heartbeat import Heartbeat, overdue_s
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
