"""`inflight run` starts the server that `serve` would; tests/integration chats with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.cli.chat.run import arguments_of
from inflight.cli.options import ServedModels

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("models", "arguments"),
    [
        (ServedModels(), []),
        (
            ServedModels(checkpoint="acme/tiny", set_=["device=cpu"]),
            ["--model=acme/tiny", "--set=device=cpu"],
        ),
        (
            ServedModels(checkpoint="acme/tiny", layout="vllm", unary=True),
            ["--model=acme/tiny", "--layout=vllm", "--unary"],
        ),
        (
            ServedModels(repository=[Path("one"), Path("two")]),
            ["--repository=one", "--repository=two"],
        ),
    ],
)
def test_the_same_models_are_served(models: ServedModels, arguments: list[str]) -> None:
    assert arguments_of(models) == arguments


def test_a_server_that_does_not_start_is_its_error(inflight: Run, tmp_path: Path) -> None:
    status, out, err = inflight("run", "--repository", str(tmp_path / "missing"))
    assert (status, out) == (1, "")
    assert err.startswith("error: repository ") and "missing is not a folder" in err
