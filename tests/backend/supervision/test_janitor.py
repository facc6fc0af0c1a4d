"""After a supervisor that was killed, its stubs end, and nothing of theirs stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.ipc import shared_memory
from inflight.ipc.runtime_folder import clean_up
from inflight.supervision import janitor
from waiting import PATIENCE_S, has_arguments, wait_until


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *arguments])
    try:
        wait_until(lambda: has_arguments(process.pid, *arguments))
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_stubs_of_a_server_are_ended_and_no_others(memory: Path, has_folder: bool) -> None:
    """Another server may have removed the folder."""
    region, other = (f"{shared_memory.region_prefix(pid)}0a_1" for pid in (4711, 47112))
    (memory / region).touch()
    folder = memory / "4711"
    if has_folder:
        folder.mkdir()
    with running(region) as stub, running(other) as another:
        clean_up(folder)
        assert stub.wait(PATIENCE_S) == -9
        assert another.poll() is None
    assert not folder.exists() and not (memory / region).exists()


def test_a_stub_is_ended_though_the_folder_is_gone(tmp_path: Path) -> None:
    region = f"{shared_memory.region_prefix(2**22 + 4711)}0a_1"
    janitor_process = janitor.start(tmp_path / str(2**22 + 4711))
    with running(region) as stub:
        assert janitor_process.stdin is not None
        janitor_process.stdin.close()
        assert janitor_process.wait(PATIENCE_S) == 0
        assert stub.wait(PATIENCE_S) == -9


def test_it_acts_when_its_starter_has_exited_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / "4711"
    folder.mkdir()
    process = janitor.start(folder)
    time.sleep(1.0)
    assert process.poll() is None and folder.exists()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
    assert not folder.exists()


def test_regions_of_stubs_that_were_never_seen_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tritonserver creates a stub's region before the stub."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / "4711").mkdir()
    names = [
        f"{shared_memory.region_prefix(pid)}0a_{number}" for pid in (4711, 47) for number in "12"
    ]
    for name in names:
        (tmp_path / name).touch()
    clean_up(tmp_path / "4711")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
