"""The audit log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.access import audit
from inflight.access.audit import MAX_LINES_PER_S, AuditLog


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_event_is_a_line_of_json_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditLog(path, Clock()).write("refused", reason="unknown", status=401)
    assert path.stat().st_mode & 0o777 == 0o600
    record = {"time": 1000.0, "event": "refused", "reason": "unknown", "status": 401}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [record]


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    hostile = '\n{"event": "key.created"}\r\x1b[2J\x7f\x9b\u2028\udcff'
    AuditLog(path).write("refused", path=hostile)
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in data[:-1])
    assert json.loads(data)["path"] == hostile


def test_values_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditLog(path).write("refused", path="x" * 10_000)
    assert len(path.read_bytes()) < 400


def test_a_flood_is_counted_not_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    clock = Clock()
    log = AuditLog(path, clock)
    for _ in range(MAX_LINES_PER_S + 50):
        log.write("refused")
    clock.now += 1
    log.write("refused")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == MAX_LINES_PER_S + 2
    assert records[-2] == {"time": 1001.0, "event": "suppressed", "count": 50}


def test_the_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 1000)
    path = tmp_path / "audit.jsonl"
    clock = Clock()
    log = AuditLog(path, clock)
    for _ in range(100):
        clock.now += 1
        log.write("refused", path="x" * 100)
    before = tmp_path / "audit.jsonl.1"
    assert path.stat().st_size <= 1000
    assert before.stat().st_size <= 1200
    assert before.stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed_and_a_failure_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "target"
    target.touch()
    path = tmp_path / "audit.jsonl"
    path.symlink_to(target)
    log = AuditLog(path)
    log.write("refused")
    log.write("refused")
    assert target.read_bytes() == b""
    assert len(caplog.records) == 1
