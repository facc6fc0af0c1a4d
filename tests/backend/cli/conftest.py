"""The command line, run in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from inflight.cli import app

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inflight(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `inflight ARGUMENTS`; returns its exit status, stdout and stderr."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inflight", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            app.main()
        shown = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), shown.out, shown.err

    return run
