"""The stubs of a server that has exited are found by their command lines, and no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.ipc import shared_memory
from inflight.ipc.processes import Process
from inflight.ipc.shared_memory import kill_stubs_left_by, region_prefix, stubs_left_by
from stubs import ANOTHER, EXITED, running_stub
from waiting import PATIENCE_S

REGION = "triton_python_backend_shm_region_0a"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield server
    server.kill()
    server.wait()


def left_by(pid: int) -> list[int]:
    return [stub.pid for stub in stubs_left_by(pid)]


def test_a_stub_is_that_of_its_tritonserver_and_of_its_supervisor() -> None:
    with running_stub(f"{region_prefix(EXITED)}0a_1", ANOTHER) as stub:
        assert left_by(EXITED) == left_by(ANOTHER) == [stub.pid]
        assert left_by(EXITED + 1) == []


@pytest.mark.parametrize("region", ["region", "/models/triton_one", "1"])
def test_a_process_without_a_region_is_no_stub(region: str) -> None:
    with running_stub(region, EXITED):
        assert left_by(EXITED) == []


def test_a_server_has_left_no_stub_before_it_has_exited(
    server: subprocess.Popen[bytes], memory: Path
) -> None:
    (memory / REGION).touch()
    with running_stub(REGION, server.pid) as stub:
        assert left_by(server.pid) == []
        assert kill_stubs_left_by(server.pid) == 0
        assert stub.poll() is None and (memory / REGION).exists()
        server.kill()
        server.wait()
        assert left_by(server.pid) == [stub.pid]


@pytest.mark.parametrize(("later_by", "is_left"), [(1, True), (0, False), (-1, False)])
def test_a_stub_that_is_younger_than_a_process_with_the_pid_is_that_ones(
    monkeypatch: pytest.MonkeyPatch, later_by: int, is_left: bool
) -> None:
    with running_stub(REGION, EXITED) as stub:
        this = Process.find(stub.pid)
        assert this is not None
        now, find = Process(EXITED, str(int(this.start_time) + later_by)), Process.find
        monkeypatch.setattr(Process, "find", lambda pid: now if pid == EXITED else find(pid))
        assert left_by(EXITED) == ([stub.pid] if is_left else [])


def test_only_stubs_of_this_user_and_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_stub(REGION, EXITED):
        monkeypatch.setattr(Process, "is_own", lambda process: False)
        assert left_by(EXITED) == []


def test_the_stubs_of_a_server_are_killed_with_their_memory(memory: Path) -> None:
    own, other = REGION, f"{REGION}_other"
    for name in (own, other):
        (memory / name).touch()
    with running_stub(own, EXITED) as stub, running_stub(other, ANOTHER) as another:
        assert kill_stubs_left_by(EXITED) == 1
        assert stub.wait(PATIENCE_S) == -9
        assert another.poll() is None
        assert [path.name for path in memory.iterdir()] == [other]
        assert kill_stubs_left_by(EXITED) == 0, "also when another process was first"


def test_the_memory_of_a_stub_that_has_just_ended_is_not_touched(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid, and so the command line that was read, may be another process's by now."""
    (memory / REGION).touch()
    with running_stub(REGION, EXITED) as stub:
        former = Process(stub.pid, "1")
        monkeypatch.setattr(shared_memory, "stubs_left_by", lambda pid: [former])
        assert kill_stubs_left_by(EXITED) == 0
        assert stub.poll() is None and (memory / REGION).exists()
