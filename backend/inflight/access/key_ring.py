"""The keys of a running server, read again when their file changes."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from inflight.access import keys_file
from inflight.access.key import ID_DIGITS, NUM_CHARACTERS, PREFIX, Key, digest
from inflight.core.file_signature import signature
from inflight.errors import ConfigError, Unauthenticated

# A revoked key is refused this soon.
REREAD_S = 0.25
_LENGTH = len(PREFIX) + NUM_CHARACTERS

logger = logging.getLogger(__name__)


class KeyRing:
    """Finds keys by their secrets.

    A new file that cannot be read leaves the keys as they were, so that a slip of an operator does
    not lock all clients out.

    Args:
        path: the keys file.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._signature = signature(path)
        self._keys = _by_id(keys_file.read(path))
        self._looked_at = clock()

    def find(self, secret: str) -> Key:
        """The key with this secret.

        Raises:
            Unauthenticated: there is none, or it has expired.
        """
        self._refresh()
        if len(secret) != _LENGTH or not secret.startswith(PREFIX):
            raise Unauthenticated("malformed")
        found = digest(secret)
        # The id is public; the rest is compared in constant time.
        key = self._keys.get(found[:ID_DIGITS])
        if key is None or not hmac.compare_digest(key.sha256, found):
            raise Unauthenticated("unknown")
        if key.has_expired():
            raise Unauthenticated(f"expired: {key.id}")
        return key

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < REREAD_S:
            return
        self._looked_at = now
        # Taken first: a change during the reading is found the next time.
        found = signature(self._path)
        if found == self._signature:
            return
        self._signature = found
        try:
            self._keys = _by_id(keys_file.read(self._path))
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)


def _by_id(keys: list[Key]) -> dict[str, Key]:
    return {key.id: key for key in keys}
