"""`inflight usage`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from inflight.access.ledger import Ledger
from inflight.cli import app

DAY_S = 86400


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["inflight", "usage", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return ended.value.code, *capsys.readouterr()


def test_usage_is_shown_by_day_tenant_and_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    for day in range(2):
        ledger = Ledger(tmp_path / "inflight" / "usage.sqlite", lambda day=day: day * DAY_S)
        ledger.add("acme/1", requests=1, prompt_tokens=20, generated_tokens=5)
        ledger.add("other/2", refused=3)
        ledger.flush()
    _, out, _ = run(monkeypatch, capsys)
    assert len(out.splitlines()) == 5
    assert "prompt tokens" in out and "1970-01-02" in out and "other" in out
    arguments = ("--tenant", "acme", "--since", "1970-01-02", "--json")
    code, out, _ = run(monkeypatch, capsys, *arguments)
    (day,) = json.loads(out)
    assert code in (None, 0)
    named = {"day": "1970-01-02", "tenant": "acme", "key": "1", "requests": 1, "refused": 0}
    assert day == {**named, "prompt_tokens": 20, "generated_tokens": 5}


def test_without_a_ledger_it_says_who_writes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(monkeypatch, capsys, "--ledger", str(tmp_path / "none"))
    assert (code, out) == (1, "")
    assert "inflight serve --keys" in err
