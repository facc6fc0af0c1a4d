"""Sets a failpoint for the engines that a test starts (see failpoints/sitecustomize.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("failpoints")


def set_failpoint(monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    """Beside those that are set."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("FAILPOINT", f"{kind}:{number}", prepend=",")


@contextlib.contextmanager
def failpoint(kind: str, number: int) -> Iterator[None]:
    """Set it within the `with` block, for a fixture of a module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_failpoint(monkeypatch, kind, number)
        yield
