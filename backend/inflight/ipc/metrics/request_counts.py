"""Counts of a door's requests by status, in a mapped file that the supervisor reads.

A count costs no system call. The file outlives its writer: the next process of the door continues.
"""

from __future__ import annotations

from pathlib import Path

from inflight.core.mapped_file import map_file

SUFFIX = ".requests"
IGNORED_SUFFIX = ".ignored"
# HTTP's statuses have three digits, gRPC's are below 17.
_NUM_STATUSES = 1000
_BYTES_PER_COUNT = 8

GRPC_STATUSES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""Their names, by number."""


class RequestCounts:
    """The writer's side; one process, and one thread of it, per file.

    Args:
        path: of the file, with the suffix SUFFIX; created unless it exists.
    """

    def __init__(self, path: Path) -> None:
        self._counts = memoryview(map_file(path, _NUM_STATUSES * _BYTES_PER_COUNT)).cast("Q")

    def count(self, status: int) -> None:
        """A request has ended with an HTTP status or the number of a gRPC status."""
        self._counts[status] += 1


def read(folder: Path, door: str) -> dict[str, int]:
    """How many requests ended with each status, over all processes of a door.

    Args:
        folder: of the files, each named DOOR or DOOR.NUMBER and SUFFIX.
        door: `http` or `grpc`.

    Returns:
        By HTTP's number or gRPC's name; statuses that did not occur are missing.
    """
    totals: dict[str, int] = {}
    for path in sorted(folder.glob(f"{door}*{SUFFIX}")):
        counts = memoryview(path.read_bytes())
        whole = len(counts) - len(counts) % _BYTES_PER_COUNT
        for status, count in enumerate(counts[:whole].cast("Q")):
            if count:
                name = GRPC_STATUSES[status] if door == "grpc" else str(status)
                totals[name] = totals.get(name, 0) + count
    return totals
