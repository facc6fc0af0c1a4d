"""Each server has a folder of its own, private to its user and removed with the server."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.ipc import runtime_folder
from inflight.ipc.shared_memory import region_prefix
from stubs import running_stub
from waiting import PATIENCE_S


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "inflight"


def test_a_folder_is_private(base: Path) -> None:
    folder = runtime_folder.folder_of(4711)
    assert folder == base / "4711"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert runtime_folder.folder_of(4711) == folder


def test_folders_of_servers_that_exited_are_removed(base: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (runtime_folder.folder_of(ended.pid) / "engine.sock").touch()
    own = runtime_folder.folder_of(os.getpid())
    (base / "other").mkdir()
    runtime_folder.remove_abandoned()
    assert sorted(base.iterdir()) == sorted([own, base / "other"])
    runtime_folder.remove_folder_of(os.getpid())
    assert not own.exists()


def test_a_stub_of_a_server_that_exited_is_ended(base: Path) -> None:
    """It may wait for its tritonserver for ever; its server's janitor may not have begun."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    runtime_folder.folder_of(ended.pid)
    with running_stub(f"{region_prefix(ended.pid)}0a_1") as stub:
        runtime_folder.remove_abandoned()
        assert stub.wait(PATIENCE_S) == -9


def test_a_folder_that_others_can_read_is_refused(base: Path) -> None:
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="must be a folder of mode 0700"):
        runtime_folder.folder_of(4711)


def test_the_folders_of_running_servers_are_listed(base: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    runtime_folder.folder_of(ended.pid)
    own = runtime_folder.folder_of(os.getpid())
    gpus = runtime_folder.gpu_folder()
    assert runtime_folder.server_folders() == [own]
    assert stat.S_IMODE(gpus.stat().st_mode) == 0o700
    runtime_folder.remove_abandoned()
    assert gpus.exists(), "it belongs to all servers"
