"""Threads and memory of a process that computes on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALLEST, _LARGEST = 128 << 10, 32 << 20
"""Of the size from which allocations are mapped: as at the start of a process, and at most."""


_SPINS = "20000"
"""Iterations of some nanoseconds: a fraction of a millisecond, instead of five. Until then an idle
thread takes a core from the next kernel's threads, or from another process. With none at all,
torch's products of small matrices wait for threads to wake."""


def limit_spinning() -> None:
    """Let OpenMP's threads, with which torch computes on a CPU, sleep soon when they have no work.

    Has an effect before torch is imported.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@contextlib.contextmanager
def mapped_allocations() -> Iterator[None]:
    """While a model is loaded, map each large allocation, so that freed ones leave no gaps.

    Without glibc nothing changes. glibc itself raises the size when mapped memory is freed. That
    suits the steps after loading, which allocate the same again and again: they get its highest
    value.
    """
    _set(_M_MMAP_THRESHOLD, _SMALLEST)
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, _LARGEST)
        _set(_M_TRIM_THRESHOLD, 2 * _LARGEST)


def return_freed_memory() -> None:
    """Give the system what is free."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(option, value)
