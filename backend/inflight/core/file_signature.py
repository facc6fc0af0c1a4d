"""Whether a file has changed, without reading it."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[int, ...] | None


def signature(path: Path) -> Signature:
    """What changes whenever the file is replaced or written; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
