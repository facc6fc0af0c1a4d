"""Mapped files have their space from the start."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from inflight.core.mapped_file import map_file


def test_what_is_written_to_memory_is_in_the_file(tmp_path: Path) -> None:
    mapped = map_file(tmp_path / "file", 100)
    assert mapped[:] == bytes(100)
    mapped[3:6] = b"abc"
    assert (tmp_path / "file").read_bytes() == bytes(3) + b"abc" + bytes(94)


def test_the_next_process_finds_what_it_has(tmp_path: Path) -> None:
    map_file(tmp_path / "file", 100)[:3] = b"abc"
    assert map_file(tmp_path / "file", 100)[:3] == b"abc"
    assert map_file(tmp_path / "file", 2)[:] == b"ab"


def test_all_of_it_is_allocated(tmp_path: Path) -> None:
    map_file(tmp_path / "file", 1 << 20)
    assert (tmp_path / "file").stat().st_blocks * 512 >= 1 << 20


def test_a_full_disk_leaves_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with caplog.at_level(logging.ERROR):
        mapped = map_file(tmp_path / "file", 100)
    mapped[:3] = b"abc"
    assert mapped[:4] == b"abc\0"
    assert (tmp_path / "file").read_bytes() == bytes(100)
    assert caplog.messages == ["file cannot be written, and is not used: No space left on device"]
