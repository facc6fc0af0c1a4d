"""The table of running requests can be read after its writer has gone."""

from __future__ import annotations

from pathlib import Path

from inflight.core import running_table
from inflight.core.running_table import DIGEST_BYTES, NUM_SLOTS, RunningTable


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def test_what_runs_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = RunningTable(path)
    assert running_table.read(path) == set()
    table.enter(7, digest(1))
    table.enter(8, digest(2))
    assert running_table.read(path) == {digest(1), digest(2)}
    assert table.leave(7) == digest(1)
    assert running_table.read(path) == {digest(2)}


def test_a_new_table_is_empty(tmp_path: Path) -> None:
    RunningTable(tmp_path / "table").enter(7, digest(1))
    RunningTable(tmp_path / "table")
    assert running_table.read(tmp_path / "table") == set()


def test_a_request_that_is_not_in_the_table_may_leave() -> None:
    assert RunningTable().leave(7) is None


def test_equal_contents_are_counted_one_by_one(tmp_path: Path) -> None:
    table = RunningTable(tmp_path / "table")
    table.enter(7, digest(1))
    table.enter(8, digest(1))
    table.leave(7)
    assert running_table.read(tmp_path / "table") == {digest(1)}


def test_a_full_table_records_no_more_and_slots_are_reused(tmp_path: Path) -> None:
    table = RunningTable(tmp_path / "table")
    for number in range(1, NUM_SLOTS + 2):
        table.enter(number, digest(number))
    assert len(table) == NUM_SLOTS
    assert table.leave(NUM_SLOTS + 1) is None
    table.leave(1)
    table.enter(NUM_SLOTS + 1, digest(NUM_SLOTS + 1))
    found = running_table.read(tmp_path / "table")
    assert found == {digest(number) for number in range(2, NUM_SLOTS + 2)}


def test_a_missing_or_cut_file_is_a_table(tmp_path: Path) -> None:
    assert running_table.read(tmp_path / "none") == set()
    (tmp_path / "cut").write_bytes(digest(5) + b"\1\2\3")
    assert running_table.read(tmp_path / "cut") == {digest(5)}
