"""A counter in a mapped file: one process counts without a system call, others read."""

from __future__ import annotations

from pathlib import Path

from inflight.core.mapped_file import map_file

_NUM_BYTES = 8


class MappedCounter:
    """The writer's side.

    Args:
        path: of the file; created unless it exists, and continued if it does.
    """

    def __init__(self, path: Path) -> None:
        self._count = memoryview(map_file(path, _NUM_BYTES)).cast("Q")

    def add(self, amount: int) -> None:
        self._count[0] += amount


def read_sum(folder: Path, pattern: str) -> int:
    """The sum of the counters whose files match a pattern."""
    found = (path.read_bytes()[:_NUM_BYTES] for path in folder.glob(pattern))
    return sum(int.from_bytes(one, "little") for one in found)
