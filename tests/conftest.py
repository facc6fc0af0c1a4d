"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything imports torch: the suite runs alongside its own servers (see runner.build).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Of several processes that run tests, each has its share of the cores.
_num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _num_processes > 1:
    _num_threads = max(1, (os.cpu_count() or 1) // _num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_threads))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A test that has torch compute on one thread does so for itself."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
