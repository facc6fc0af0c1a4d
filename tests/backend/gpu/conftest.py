"""The engine on a GPU: `pytest -m gpu tests/backend/gpu`. Without one, these tests are left out."""

from __future__ import annotations

import importlib.util

import pytest
import torch

# The runner imports cuda.core, which a plain installation has not.
if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    if not torch.cuda.is_available():
        # Not skipped: requesting these tests without a GPU must not pass.
        pytest.fail("no CUDA device; these tests are left out without -m gpu", pytrace=False)
