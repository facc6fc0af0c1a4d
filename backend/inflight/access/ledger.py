"""What tenants have used, by day: a SQLite database in the state folder."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from inflight.access.key import ACCOUNT_SEPARATOR
from inflight.deploy.log_files import state_folder
from inflight.errors import ConfigError

TIMEOUT_S = 5.0
_COUNTS = ("requests", "refused", "prompt_tokens", "generated_tokens")
_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    requests INTEGER NOT NULL, refused INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, generated_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, key)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, refused = refused + excluded.refused,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    generated_tokens = generated_tokens + excluded.generated_tokens
"""

logger = logging.getLogger(__name__)


class Day(msgspec.Struct, frozen=True):
    """What one key of a tenant has used on a day.

    Attributes:
        day: in UTC, YYYY-MM-DD.
        key: its id.
        requests: that were admitted.
        refused: by a limit of the key.
        prompt_tokens: of requests that the engine accepted; cached ones count.
        generated_tokens: of outputs that have ended, cancelled ones included.
    """

    day: str
    tenant: str
    key: str
    requests: int
    refused: int
    prompt_tokens: int
    generated_tokens: int


def default_path() -> Path:
    return state_folder() / "usage.sqlite"


class Ledger:
    """Adds up in memory; `flush`, on any thread, writes. Several servers may share the file.

    Args:
        path: of the database; created with mode 0600.
        clock: seconds since 1970.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._added: dict[tuple[str, str, str], list[int]] = {}
        self._has_failed = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            with _opened(path) as database:
                database.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: {error}") from None

    def add(
        self,
        account: str,
        *,
        requests: int = 0,
        refused: int = 0,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
    ) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        tenant, _, key = account.partition(ACCOUNT_SEPARATOR)
        counts = (requests, refused, prompt_tokens, generated_tokens)
        with self._lock:
            self._merge((day, tenant, key), counts)

    def flush(self) -> None:
        """Write what was added; kept for the next time if that fails."""
        with self._lock:
            added, self._added = self._added, {}
        if not added:
            return
        try:
            with _opened(self._path) as database:
                database.executemany(_ADD, [(*key, *counts) for key, counts in added.items()])
            self._has_failed = False
        except sqlite3.Error as error:
            if not self._has_failed:
                logger.error("the usage cannot be written, and is kept: %s", error)
            self._has_failed = True
            with self._lock:
                for key, counts in added.items():
                    self._merge(key, counts)

    def _merge(self, key: tuple[str, str, str], counts: tuple[int, ...] | list[int]) -> None:
        sums = self._added.setdefault(key, [0] * len(_COUNTS))
        for index, count in enumerate(counts):
            sums[index] += count


def read(path: Path, tenant: str | None = None, since: str = "") -> list[Day]:
    """What was used, by day, tenant and key.

    Args:
        tenant: only of this one.
        since: only from this day on.

    Raises:
        ConfigError: there is no ledger, or it cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no usage is recorded; `inflight serve --keys` records it")
    query = "SELECT * FROM usage WHERE day >= ? AND (? IS NULL OR tenant = ?) ORDER BY 1, 2, 3"
    try:
        with _opened(path) as database:
            return [Day(*row) for row in database.execute(query, (since, tenant, tenant))]
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with (
        contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT_S)) as database,
        database,  # one transaction
    ):
        yield database
