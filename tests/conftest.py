"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything imports torch: the suite runs beside servers of its own (see runner.build).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A test that has torch compute on one thread does so for itself."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
