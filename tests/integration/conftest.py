"""Real tritonservers, one per device and session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import supervised
from serving import Triton, serve
from supervised import Serving


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Answers each prompt with itself."""
    yield from serve(tmp_path_factory.mktemp("echo"), "echo")


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Runs the small model."""
    yield from serve(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Runs the small model, with two processes that serve the gateway."""
    options = ("--gateway-port", "0", "--gateway-workers", "2")
    with supervised.serve(tmp_path_factory.mktemp("gateway"), "cpu", *options) as found:
        yield found
