"""Threads share sandboxes without waiting for each other."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inflight.errors import EngineError
from inflight.sandbox.messages import Limits
from inflight.sandbox.pool import SandboxPool
from inflight.sandbox.process import SandboxProcess

pytestmark = pytest.mark.alone

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(autouse=True)
def find_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.fixture
def pool() -> Iterator[SandboxPool]:
    limits = Limits(cpu_s=2.0, wall_s=2.0, memory=64 << 20)
    pool = SandboxPool(lambda: SandboxProcess("sandbox_jobs", "test", limits), size=3)
    yield pool
    pool.close()


def test_jobs_of_one_thread_share_a_sandbox(pool: SandboxPool) -> None:
    pool.warm()
    for _ in range(5):
        pool.run(b"answer = b''")
    assert len(pool.pids) == 1


def test_a_job_does_not_wait_for_another_thread_s(pool: SandboxPool) -> None:
    answers: list[bytes] = []
    meeting = "import time, os; open({0!r}, 'w').close()\nwhile not os.path.exists({1!r}): "
    meeting += "time.sleep(0.01)\nanswer = b'met'"

    def run(job: str) -> None:
        answers.append(pool.run(job.encode()))

    first, second = f"/tmp/sandbox-{os.getpid()}-a", f"/tmp/sandbox-{os.getpid()}-b"
    jobs = (meeting.format(first, second), meeting.format(second, first))
    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for path in (first, second):
            Path(path).unlink(missing_ok=True)
    assert answers == [b"met", b"met"]
    assert len(pool.pids) == 2


def test_more_jobs_than_sandboxes_wait(pool: SandboxPool) -> None:
    job = b"import time; time.sleep(0.05); answer = b'done'"
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(pool.run(job))) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"done"] * 9
    assert len(pool.pids) <= 3


def test_a_lost_sandbox_is_replaced(pool: SandboxPool) -> None:
    pool.warm()
    (pid,) = pool.pids
    os.killpg(pid, signal.SIGKILL)
    assert pool.run(b"answer = b'here'") == b"here"
    assert pool.pids != [pid]


def test_a_job_that_kills_its_sandbox_fails(pool: SandboxPool) -> None:
    with pytest.raises(EngineError, match="died twice; retry later"):
        pool.run(b"import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert pool.run(b"answer = b'here'") == b"here"


def test_closing_ends_all(pool: SandboxPool) -> None:
    pool.warm()
    (pid,) = pool.pids
    process = psutil.Process(pid)
    pool.close()
    assert not process.is_running()
    assert pool.pids == []
