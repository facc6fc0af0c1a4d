"""After a supervisor that was killed, its stubs end, and nothing of theirs stays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight.ipc import shared_memory
from inflight.supervision import janitor


@pytest.mark.parametrize("is_stub", [True, False])
def test_only_stubs_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stub: bool
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    region = tmp_path / "triton_region"
    region.touch()
    arguments = [region.name] if is_stub else ["another process with its pid"]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *arguments])
    try:
        time.sleep(0.3)  # its arguments are those of this process before
        folder = tmp_path / "4711"
        folder.mkdir()
        for pid in (process.pid, 2**22 + 1):  # the second one has exited
            (folder / f"stub-{pid}.beat").touch()
        janitor.clean(folder)
        assert not folder.exists()
        assert region.exists() != is_stub
        if is_stub:
            assert process.wait(10) == -9
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_it_acts_when_its_starter_has_exited_and_not_before(tmp_path: Path) -> None:
    folder = tmp_path / "4711"
    folder.mkdir()
    process = janitor.start(folder)
    time.sleep(1.0)
    assert process.poll() is None and folder.exists()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
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
    janitor.clean(tmp_path / "4711")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
