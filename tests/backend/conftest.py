"""Fixtures shared by the backend's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from inflight.checkpoint.locate import Checkpoint

pytest.register_assert_rewrite("device_drafting")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A two-layer llama with random weights and a vocabulary of 160 tokens."""
    folder: Path = tmp_path_factory.mktemp("tiny_llama")
    return tiny.write_llama(folder)
