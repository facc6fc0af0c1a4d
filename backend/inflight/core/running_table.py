"""The requests that an engine runs, by the digests of their contents, in a mapped file.

The file outlives an engine that crashes. A request is written when it starts and cleared when it
has ended, so a step costs nothing and nothing is a system call.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

from inflight.core.mapped_file import map_file

DIGEST_BYTES = 16
# More than can run at a time: those of failed steps stay until a step succeeds.
NUM_SLOTS = 4096
_EMPTY = bytes(DIGEST_BYTES)


class RunningTable:
    """The writer's side.

    Args:
        path: of the file; created or replaced. None for a table in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        size = NUM_SLOTS * DIGEST_BYTES
        self._map = mmap.mmap(-1, size) if path is None else map_file(path, size)
        self._map[:] = bytes(size)
        self._free = list(range(NUM_SLOTS))
        self._offsets: dict[int, int] = {}  # by request id

    def __len__(self) -> int:
        return len(self._offsets)

    def enter(self, request_id: int, digest: bytes) -> None:
        """A request starts; it is not recorded if the table is full."""
        if self._free and request_id not in self._offsets:
            offset = self._offsets[request_id] = self._free.pop() * DIGEST_BYTES
            self._map[offset : offset + DIGEST_BYTES] = digest

    def leave(self, request_id: int) -> bytes | None:
        """A request has ended; returns its digest if it was recorded."""
        offset = self._offsets.pop(request_id, None)
        if offset is None:
            return None
        digest = self._map[offset : offset + DIGEST_BYTES]
        self._map[offset : offset + DIGEST_BYTES] = _EMPTY
        self._free.append(offset // DIGEST_BYTES)
        return digest


def read(path: Path) -> set[bytes]:
    """The digests in the table of an engine that has exited; empty if there is none."""
    content = b""
    with contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
    slots = range(0, len(content) - DIGEST_BYTES + 1, DIGEST_BYTES)
    return {content[at : at + DIGEST_BYTES] for at in slots} - {_EMPTY}
