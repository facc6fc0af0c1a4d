"""A model's folder, with the echo engine in its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

import small_checkpoint
from attached_front import write_config


@pytest.fixture
def model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    model = small_checkpoint.write(tmp_path / "checkpoint")
    write_config(tmp_path / "llm", model=str(model), device="echo")
    return tmp_path / "llm"
