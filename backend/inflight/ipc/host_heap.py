"""How glibc's allocator keeps memory; without glibc nothing here has an effect."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALLEST, _LARGEST = 128 << 10, 32 << 20
"""Of the size from which allocations are mapped: as at the start of a process, and at most."""


@contextlib.contextmanager
def mapped_allocations() -> Iterator[None]:
    """While a model is loaded, map each large allocation, so that freed ones leave no gaps.

    glibc itself raises the size when mapped memory is freed. That suits the steps after loading,
    which allocate the same again and again: they get its highest value.
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
