"""Doors read what the supervisor wrote, and nothing that is old."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from inflight.ipc import health
from inflight.ipc.health import MAX_AGE_S, UNKNOWN, Health


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = Health(is_live=True, is_ready=False, reason="loading", models=[])
    health.write(tmp_path / "health.json", written)
    found = health.read(tmp_path / "health.json")
    assert msgspec.structs.replace(found, written_at=0.0) == written
    assert list(tmp_path.iterdir()) == [tmp_path / "health.json"]


def test_an_old_health_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "health.json"
    health.write(path, Health(is_live=True, is_ready=True))
    assert health.read(path).is_ready
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + MAX_AGE_S + 1.0)
    assert health.read(path) == UNKNOWN


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"is_live": 3}', b"\xff"])
def test_a_broken_file_is_unknown(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    path.write_bytes(content)
    assert health.read(path) == UNKNOWN


def test_a_missing_file_is_unknown(tmp_path: Path) -> None:
    assert health.read(tmp_path / "health.json") == UNKNOWN


def test_a_full_disk_has_room_for_it_in_place_of_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "health.json"
    health.write(path, Health(is_live=True, is_ready=False, reason="llm is loading"))

    def fail(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    health.write(path, Health(is_live=True, is_ready=True, models=["a"]))
    assert health.read(path).is_ready, "a shorter one"
    reason = "the engine of llm was killed by SIGKILL; tritonserver is starting"
    health.write(path, Health(is_live=True, is_ready=False, reason=reason))
    assert health.read(path).reason == reason, "a longer one"
    path.unlink()
    with pytest.raises(OSError, match="No such file"):
        health.write(path, Health(is_live=True, is_ready=True))
