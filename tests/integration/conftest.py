"""Real tritonservers, one per device and session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

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
    """Runs the small model, and drafts from the text itself for requests that ask for it."""

    def prepare(models: Path) -> None:
        path = models / "llm" / "1" / "engine.json"
        settings = json.loads(path.read_text())
        settings["speculative_config"] = {"num_speculative_tokens": 4, "default": "off"}
        path.write_text(json.dumps(settings))

    yield from serve(tmp_path_factory.mktemp("cpu"), "cpu", prepare)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Runs the small model, with two processes that serve the gateway."""
    options = ("--gateway-port", "0", "--gateway-workers", "2")
    with supervised.serve(tmp_path_factory.mktemp("gateway"), "cpu", *options) as found:
        yield found
