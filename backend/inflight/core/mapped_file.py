"""Small files that one process writes by memory and others read."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def map_file(path: Path, size: int) -> mmap.mmap:
    """A file, created if missing, of `size` bytes; what it has stays.

    All of it is allocated: a write to a page for which the disk has no room would end the process
    with SIGBUS. If there is no room now, returns memory that no other process sees, of zeros, and
    logs it.
    """
    try:
        with open(path, "a+b") as file:
            file.truncate(size)
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        logger.error("%s cannot be written, and is not used: %s", path.name, error.strerror)
        return mmap.mmap(-1, size)
