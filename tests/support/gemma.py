"""The model of `make gemma`, for the tests of `make test-gemma`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inflight.checkpoint.locate import Checkpoint, locate

PATH = Path(sys.prefix) / "models" / "gemma-3-270m-q4_k_m.gguf"


def checkpoint() -> Checkpoint:
    """Skips the test if the model is not there."""
    if not PATH.is_file():
        pytest.skip(f"{PATH} is missing; run `make gemma`, 238 MB under Gemma's terms")
    return locate(str(PATH))
