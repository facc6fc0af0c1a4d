"""The model of `make gemma`, for the tests of `make test-gemma`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inflight.checkpoint.locate import Checkpoint, locate

PATH = Path(sys.prefix) / "models" / "gemma-3-270m-q4_k_m.gguf"


def checkpoint() -> Checkpoint:
    """Skips the test without the model's file."""
    # 238 MB under Gemma's terms, therefore not installed by default. The family's logits are tested
    # without it, in tests/backend/models/families/test_gemma3.py.
    if not PATH.is_file():
        pytest.skip(f"{PATH} is missing; run `make gemma`, 238 MB under Gemma's terms")
    return locate(str(PATH))
