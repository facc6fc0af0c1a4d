"""Launches that are noted in place of being made, to find out which kernels will be needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Launched = dict[tuple[str, str], None]
"""Stem and name of each kernel that was launched, in the order of first launches."""

_launched: Launched | None = None
_clear: list[Callable[[], None]] = []

_Cached = TypeVar("_Cached", bound="functools._lru_cache_wrapper[Any]")


def cleared_by_recordings(function: _Cached) -> _Cached:
    """Clear a function's cache at the start and at the end of each recording.

    The function then checks for a recording only on a cache miss, so launches cost no more.
    """
    _clear.append(function.cache_clear)
    return function


def launched() -> Launched | None:
    """The current recording; None if launches are not recorded."""
    return _launched


@contextlib.contextmanager
def record_launches() -> Iterator[Launched]:
    """Record the kernels that are launched in the context; nothing is compiled, and nothing runs.

    Operands are on torch's meta device, where they have shapes but no memory. No other thread of
    the process may launch meanwhile: its kernels would not run. Of nested recordings, only the
    innermost one is active.
    """
    global _launched
    found: Launched = {}
    outer, _launched = _launched, found
    _clear_caches()
    try:
        yield found
    finally:
        _launched = outer
        _clear_caches()


def _clear_caches() -> None:
    for clear in _clear:
        clear()
