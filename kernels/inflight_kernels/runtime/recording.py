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
    """Have a cached function forget its results where a recording begins and where it ends.

    It then looks for a recording only where it has no result yet, so launches cost no more.
    """
    _clear.append(function.cache_clear)
    return function


def launched() -> Launched | None:
    """Where to note launches; None unless they are recorded."""
    return _launched


@contextlib.contextmanager
def record_launches() -> Iterator[Launched]:
    """Note the kernels that are launched within; nothing is compiled, and nothing runs.

    Operands are on torch's meta device, where they have shapes and no memory. No other thread of
    the process may launch meanwhile: its kernels would not run. Within another recording, only this
    one takes note.
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
