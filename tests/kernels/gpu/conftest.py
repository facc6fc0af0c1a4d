"""Kernels on a GPU: `pytest -m gpu tests/kernels/gpu`. Without one, these tests are left out.

INFLIGHT_TEST_EVERY=30 keeps each 30th case of every test, the first included: enough under a tool
that makes each launch slow, such as compute-sanitizer (`make sanitize`).
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import pytest
import torch

# The modules of ops import cuda.core, which a plain installation has not.
if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        # Not skipped: requesting these tests without a GPU must not pass.
        pytest.fail("no CUDA device; these tests are left out without -m gpu", pytrace=False)
    torch.manual_seed(0)
    # A reference evaluated on the GPU is as exact as its type.
    torch.backends.cuda.matmul.allow_tf32 = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    every = int(os.environ.get("INFLIGHT_TEST_EVERY", "1"))
    seen: Counter[str] = Counter()
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if seen[name] % every == 0:
            kept.append(item)
        seen[name] += 1
    items[:] = kept
