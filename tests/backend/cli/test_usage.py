"""`inflight usage`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from inflight.access.ledger import Ledger

DAY_S = 86400
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(inflight: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    return partial(inflight, "usage")


def test_usage_is_shown_by_day_tenant_and_key(run: Run, tmp_path: Path) -> None:
    for day in range(2):
        ledger = Ledger(tmp_path / "inflight" / "usage.sqlite", lambda day=day: day * DAY_S)
        ledger.add("acme/1", requests=1, prompt_tokens=20, generated_tokens=5)
        ledger.add("other/2", refused=3)
        ledger.flush()
    _, out, _ = run()
    assert len(out.splitlines()) == 5
    assert "prompt tokens" in out and "1970-01-02" in out and "other" in out
    arguments = ("--tenant", "acme", "--since", "1970-01-02", "--json")
    code, out, _ = run(*arguments)
    (day,) = json.loads(out)
    assert code == 0
    named = {"day": "1970-01-02", "tenant": "acme", "key": "1", "requests": 1, "refused": 0}
    assert day == {**named, "prompt_tokens": 20, "generated_tokens": 5}


def test_without_a_ledger_it_says_who_writes_one(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--ledger", str(tmp_path / "none"))
    assert (code, out) == (1, "")
    assert "inflight serve --keys" in err
