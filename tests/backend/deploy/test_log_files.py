"""A log does not fill the disk."""

from __future__ import annotations

from pathlib import Path

from inflight.deploy.log_files import cap_log


def test_a_log_that_is_too_large_is_moved_aside_while_others_write(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"a" * 100)
        cap_log(path, max_bytes=100)
        assert path.stat().st_size == 100, "not too large yet"
        writer.write(b"b")
        cap_log(path, max_bytes=100)
        writer.write(b"c")
    assert path.read_bytes() == b"c"
    assert (tmp_path / "server.log.1").read_bytes() == b"a" * 100 + b"b"


def test_only_one_former_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for content in (b"1" * 10, b"2" * 10):
        path.write_bytes(content)
        cap_log(path, max_bytes=5)
    assert (tmp_path / "server.log.1").read_bytes() == b"2" * 10
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    cap_log(tmp_path / "server.log")
