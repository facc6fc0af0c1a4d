"""Small memory-mapped files that one process writes and others read."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file of `size` bytes, which is created if missing; existing contents are kept.

    Its blocks are allocated first: writing to a page without one on a full disk would end the
    process with SIGBUS.

    Returns:
        The mapping; zeroed memory that is not shared if the file cannot be written, which is
        logged.
    """
    try:
        with open(path, "a+b") as file:
            file.truncate(size)
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        logger.error("%s cannot be written, and is not used: %s", path.name, error.strerror)
        return mmap.mmap(-1, size)
