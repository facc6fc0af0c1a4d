"""The ledger of usage."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from inflight.access.ledger import Day, Ledger, read
from inflight.errors import ConfigError

NOON = 1_700_000_000.0  # 2023-11-14
DAY_S = 86400


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "usage.sqlite"


def test_usage_adds_up_by_day_tenant_and_key(path: Path) -> None:
    clock = Clock()
    ledger = Ledger(path, clock)
    for _ in range(3):
        ledger.add("acme/1", requests=1)
        ledger.flush()
    ledger.add("acme/1", prompt_tokens=10, generated_tokens=4)
    ledger.add("acme/2", requests=1, refused=2)
    clock.now += DAY_S
    ledger.add("acme/1", requests=1)
    ledger.flush()
    assert read(path) == [
        Day("2023-11-14", "acme", "1", 3, 0, 10, 4),
        Day("2023-11-14", "acme", "2", 1, 2, 0, 0),
        Day("2023-11-15", "acme", "1", 1, 0, 0, 0),
    ]
    assert [day.day for day in read(path, since="2023-11-15")] == ["2023-11-15"]
    assert read(path, "other") == []


def test_the_file_is_private(path: Path) -> None:
    Ledger(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_before_a_flush(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add("acme/1", requests=1)
    assert read(path) == []


def test_two_servers_share_a_ledger(path: Path) -> None:
    ledgers = [Ledger(path, Clock()) for _ in range(2)]

    def work(ledger: Ledger) -> None:
        for _ in range(50):
            ledger.add("acme/1", requests=1)
            ledger.flush()

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [day.requests for day in read(path)] == [100]


def test_what_cannot_be_written_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(path)
    ledger.add("acme/1", requests=2)
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE usage RENAME TO other")
    ledger.flush()
    ledger.flush()
    assert len(caplog.records) == 1
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE other RENAME TO usage")
    database.close()
    ledger.add("acme/1", requests=1)
    ledger.flush()
    assert [day.requests for day in read(path)] == [3]


def test_a_missing_ledger_says_who_writes_it(path: Path) -> None:
    with pytest.raises(ConfigError, match="inflight serve --keys"):
        read(path)


def test_a_file_that_is_no_database_is_an_error(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("no database at all" * 100)
    with pytest.raises(ConfigError, match=r"usage\.sqlite: "):
        Ledger(path)
