"""Sets a failpoint for the engines that a test starts (see failpoints/sitecustomize.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("failpoints")


def set_failpoint(monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("FAILPOINT", f"{kind}:{number}")
