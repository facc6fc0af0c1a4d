"""A keys file with an accountant, for doors under test."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.access import keys_file
from inflight.access.key import Key, KeyLimits, issue
from waiting import PATIENCE_S, wait_until


@dataclass
class KeyDesk:
    """Issues keys.

    Attributes:
        path: the keys file.
        folder: of the accountant's sockets.
        ledger, audit: its files.
        process: the accountant.
    """

    path: Path
    folder: Path
    ledger: Path
    audit: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Of a door."""
        files = {"keys": self.path, "accounts": self.folder / "accounts.sock", "audit": self.audit}
        return tuple(word for name, path in files.items() for word in (f"--{name}", str(path)))

    def issue(self, tenant: str = "acme", limits: KeyLimits | None = None, **fields: Any) -> str:
        """The secret of a new key."""
        return self.issue_key(tenant, limits, **fields)[1]

    def issue_key(
        self, tenant: str = "acme", limits: KeyLimits | None = None, **fields: Any
    ) -> tuple[Key, str]:
        key, secret = issue(tenant, limits=limits or KeyLimits(), **fields)
        keys_file.add(self.path, key)
        time.sleep(0.3)  # doors look at the file four times a second
        return key, secret

    def revoke(self, key: Key) -> None:
        keys_file.revoke(self.path, key.id)
        time.sleep(0.3)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "inflight.access.accountant"),
                *("--listen", str(self.folder / "accounts.sock"), "--ledger", str(self.ledger)),
            ]
        )
        wait_until(lambda: self.process.poll() is not None or self._listens())
        assert self.process.poll() is None

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(str(self.folder / "accounts.sock")) == 0

    def start_again(self) -> None:
        """After it was killed."""
        (self.folder / "accounts.sock").unlink()
        self.start()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            assert self.process.wait(PATIENCE_S) == 0


@contextlib.contextmanager
def desk(folder: Path) -> Iterator[KeyDesk]:
    folder.mkdir(parents=True, exist_ok=True)
    found = KeyDesk(folder / "keys.json", folder, folder / "usage.sqlite", folder / "audit.jsonl")
    keys_file.add(found.path, issue("nobody")[0])
    found.start()
    try:
        yield found
    finally:
        found.stop()
