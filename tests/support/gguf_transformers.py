"""GGUF files as `transformers` reads them, in a third of the time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest


@contextmanager
def quick_reader() -> Iterator[None]:
    """`transformers` reads a file three times, and makes the map of tensor names for each of its
    modules. The reader slices the file a million times, which costs most for a mapped one."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        quick = SimpleNamespace(**vars(np) | {"memmap": _read})
        patch.setattr(gguf.gguf_reader, "np", quick)
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield


def _read(path: Path, mode: str) -> npt.NDArray[Any]:
    return np.fromfile(path, np.uint8)
