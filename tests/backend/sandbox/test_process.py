"""A job can crash, hang or exhaust its worker, and the next job runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inflight.errors import EngineError
from inflight.sandbox.messages import Limits
from inflight.sandbox.process import LimitExceeded, SandboxLost, SandboxProcess
from waiting import wait_until_ended

pytestmark = pytest.mark.alone

SUPPORT = Path(__file__).parents[2] / "support"
LIMITS = Limits(cpu_s=0.2, wall_s=1.0, memory=64 << 20)
OWNER = """
import sys, time
from inflight.sandbox.messages import Limits
from inflight.sandbox.process import SandboxProcess
sandbox = SandboxProcess("sandbox_jobs", "test", Limits(1.5, 1.5, 64 << 20))
print(sandbox.run(b"import os; answer = f'{os.getpid()} {os.getppid()}'.encode()").decode())
sys.stdout.flush()
sandbox.run(b"while True: pass")
"""


@pytest.fixture(autouse=True)
def find_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.fixture
def sandbox() -> Iterator[SandboxProcess]:
    sandbox = SandboxProcess("sandbox_jobs", "test", LIMITS, lambda: b"the setup")
    sandbox.start()
    yield sandbox
    sandbox.close()


def test_a_worker_is_kept_between_jobs(sandbox: SandboxProcess) -> None:
    assert sandbox.run(b"answer = setup") == b"the setup"
    job = b"import os; answer = f'{os.getpid()} {count}'.encode()"
    first, second = sandbox.run(job).split(), sandbox.run(job).split()
    assert first[0] == second[0]
    assert (first[1], second[1]) == (b"2", b"3")


@pytest.mark.parametrize(
    ("job", "cause"),
    [
        ("while True: pass", "time"),
        ("sum(x for x in range(10**12))", "time"),
        ("9 ** 9 ** 9", "time"),
        ("import time; time.sleep(60)", "time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time"),
        ("import signal; signal.signal(signal.SIGTERM, lambda *_: 0)\nwhile True: pass", "time"),
        ("x = b'a' * 10**9", "memory"),
        ("x = []\nwhile True: x.append(b'a' * 10**6)", "memory"),
        ("import os; os._exit(3)", "memory"),
        ("import os; os.abort()", "memory"),
        ("raise MemoryError", "memory"),
        ("answer = b'a' * (65 << 20)", "memory"),
        ("import ctypes; ctypes.string_at(0)", "stack"),
    ],
)
def test_only_the_worker_dies(sandbox: SandboxProcess, job: str, cause: str) -> None:
    pid = sandbox.pid
    started = time.monotonic()
    with pytest.raises(LimitExceeded) as caught:
        sandbox.run(job.encode())
    assert caught.value.cause == cause
    assert time.monotonic() - started < 2.0
    assert sandbox.pid == pid
    assert sandbox.run(b"answer = str(count).encode()") == b"1"  # a new worker
    assert len(psutil.Process(pid).children()) == 1


def test_a_job_may_allow_itself_more_time(sandbox: SandboxProcess) -> None:
    busy = "import time; allow_cpu({}); end = time.thread_time() + 0.3\n"
    busy += "while time.thread_time() < end: pass\nanswer = b'done'"
    assert sandbox.run(busy.format(0.6).encode()) == b"done"
    with pytest.raises(LimitExceeded):  # the next job has its usual time again
        sandbox.run(b"while True: pass")


def test_a_worker_has_two_files_and_prints_nowhere(
    sandbox: SandboxProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = sandbox.run(
        b"import os; print('x'); os.write(2, b'x')\n"
        b"answer = ' '.join(os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)).encode()\n"
        b"answer += f' {len(os.listdir(\"/proc/self/fd\"))}'.encode()"
    )
    assert listed == b"/dev/null /dev/null /dev/null 6"  # one is the listing
    assert capfd.readouterr() == ("", "")


def test_a_closed_worker_cannot_open_files() -> None:
    limits = Limits(cpu_s=0.5, wall_s=1.0, memory=64 << 20, is_closed=True)
    sandbox = SandboxProcess("sandbox_jobs", "test", limits)
    try:
        for call in ("open('/etc/passwd')", "__import__('socket').socket()", "os.pipe()"):
            job = f"import os\ntry: {call}\nexcept (OSError, ImportError): answer = b'refused'"
            assert sandbox.run(job.encode()) == b"refused"
    finally:
        sandbox.close()


def test_a_job_that_is_large_arrives(sandbox: SandboxProcess) -> None:
    job = b"answer = b'" + b"x" * (8 << 20) + b"'"
    assert len(sandbox.run(job)) == 8 << 20


def test_a_process_that_hangs_is_replaced(sandbox: SandboxProcess) -> None:
    pid = sandbox.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(SandboxLost):
        sandbox.run(b"#" + b"x" * (1 << 20))  # more than its pipe holds
    assert time.monotonic() - started < 3.0
    assert sandbox.run(b"answer = b'here'") == b"here"
    assert sandbox.pid not in (None, pid)


def test_a_module_that_does_not_start_is_named() -> None:
    sandbox = SandboxProcess("inflight.no_such_module", "test", LIMITS)
    with pytest.raises(EngineError, match="the test process does not start"):
        sandbox.start()
    assert sandbox.pid is None


def test_all_end_with_their_owner() -> None:
    """Even if it is killed while a worker works."""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert all(process.is_running() for process in processes)
        owner.kill()
    wait_until_ended(processes)
