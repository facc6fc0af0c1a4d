"""Real tritonservers, one per device and session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving import Triton, serve


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Answers each prompt with itself."""
    yield from serve(tmp_path_factory.mktemp("echo"), "echo")


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Runs the small model."""
    yield from serve(tmp_path_factory.mktemp("cpu"), "cpu")
