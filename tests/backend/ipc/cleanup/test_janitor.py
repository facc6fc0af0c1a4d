"""After a server that was killed, its stubs end, and nothing of theirs stays."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight.ipc import shared_memory
from inflight.ipc.cleanup import janitor
from inflight.ipc.runtime_folder import clean_up
from inflight.triton import stub as triton_stub
from stubs import ANOTHER, ENDS_BY_ITSELF, EXITED, running_stub
from waiting import PATIENCE_S


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def act(process: subprocess.Popen[bytes]) -> None:
    """As if its starter had exited."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_stubs_of_a_server_are_ended_and_no_others(memory: Path, has_folder: bool) -> None:
    """Another server may have removed the folder."""
    region, other = (f"{shared_memory.region_prefix(pid)}0a_1" for pid in (EXITED, ANOTHER))
    (memory / region).touch()
    folder = memory / str(EXITED)
    if has_folder:
        folder.mkdir()
    with running_stub(region) as stub, running_stub(other) as another:
        assert clean_up(folder) == 1
        assert stub.wait(PATIENCE_S) == -9
        assert another.poll() is None
    assert not folder.exists() and not (memory / region).exists()


def test_a_stub_is_ended_though_the_folder_is_gone(tmp_path: Path) -> None:
    region = f"{shared_memory.region_prefix(EXITED)}0a_1"
    process = janitor.start(tmp_path / str(EXITED))
    with running_stub(region) as stub:
        act(process)
        assert stub.wait(PATIENCE_S) == -9


def test_a_stub_of_a_plain_tritonserver_is_ended_after_a_while(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has time to end by itself."""
    regions = [
        Path("/dev/shm", f"triton_python_backend_shm_region_{secrets.token_hex(8)}")
        for _ in range(3)
    ]
    hangs, ends, other = regions
    for region in regions:
        region.touch()
    try:
        with (
            running_stub(hangs.name, EXITED) as hanging,
            running_stub(ends.name, EXITED, ENDS_BY_ITSELF) as ending,
            running_stub(other.name, ANOTHER) as another,
        ):
            # Several engines may have belonged to the server.
            first, second = (janitor.start(tmp_path / str(EXITED)) for _ in range(2))
            act(first)
            act(second)
            assert hanging.wait(PATIENCE_S) == -9
            assert ending.wait(PATIENCE_S) == 0
            assert another.poll() is None
        assert [region.exists() for region in regions] == [False, True, True]
        assert "inflight.janitor: killed 1 of the models' processes" in capfd.readouterr().err
    finally:
        for region in regions:
            region.unlink(missing_ok=True)


def test_the_stubs_of_a_running_server_are_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        with running_stub("triton_python_backend_shm_region_1", server.pid) as stub:
            act(janitor.start(tmp_path / str(server.pid)))
            assert stub.poll() is None
        server.kill()


def test_stubs_have_the_time_that_they_need_to_end_by_themselves() -> None:
    assert janitor.GRACE_S >= triton_stub.SERVER_POLL_S + triton_stub.EXIT_GRACE_S + 1.0


def test_it_acts_when_its_starter_has_exited_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / str(EXITED)
    folder.mkdir()
    process = janitor.start(folder)
    time.sleep(1.0)
    assert process.poll() is None and folder.exists()
    act(process)
    assert not folder.exists()


def test_the_folder_of_another_server_with_the_same_pid_stays(memory: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        folder, region = memory / str(server.pid), shared_memory.region_prefix(server.pid) + "0a_1"
        folder.mkdir()
        (memory / region).touch()
        with running_stub(region) as stub:
            assert clean_up(folder) == 0
            assert stub.poll() is None
        assert folder.exists() and (memory / region).exists()
        server.kill()


def test_regions_of_stubs_that_were_never_seen_are_removed(memory: Path) -> None:
    """tritonserver creates a stub's region before the stub."""
    (memory / str(EXITED)).mkdir()
    names = [
        f"{shared_memory.region_prefix(pid)}0a_{number}"
        for pid in (EXITED, EXITED // 10)
        for number in "12"
    ]
    for name in names:
        (memory / name).touch()
    clean_up(memory / str(EXITED))
    assert sorted(path.name for path in memory.iterdir()) == sorted(names[2:])
