"""`inflight key`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from inflight.access.key import digest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(inflight: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    return partial(inflight, "key")


def test_a_key_is_created_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    status, out, err = run("create", "--tenant", "acme")
    secret = out.strip()
    assert (status, out) == (0, secret + "\n")
    key_id = digest(secret)[:12]
    assert f"id {key_id}, tenant acme" in err
    assert secret not in err
    path = tmp_path / "config" / "inflight" / "keys.json"
    assert path.stat().st_mode & 0o777 == 0o600
    status, out, _ = run("list")
    assert status == 0 and key_id in out and "acme" in out and secret not in out
    assert run("revoke", key_id)[0] == 0
    assert run("list", "--json")[1] == "[]\n"


def test_json_has_everything_but_the_hash(run: Run, tmp_path: Path) -> None:
    arguments = ("--tenant", "acme", "--admin", "--expires-days", "1", "--model", "chat")
    bounds = ("--requests-per-minute", "6", "--tokens-per-minute", "7")
    more = ("--concurrent-requests", "8", "--keys", str(tmp_path / "k.json"), "--json")
    _, out, err = run("create", *arguments, *bounds, *more)
    created = json.loads(out)
    assert err == ""
    secret = created.pop("key")
    assert created["expires"] - created["created"] == 86400
    expected = {"id": digest(secret)[:12], "tenant": "acme", "role": "admin", "models": ["chat"]}
    limits = {"requests_per_minute": 6, "tokens_per_minute": 7, "concurrent_requests": 8}
    assert created.items() >= {**expected, "limits": limits}.items()
    assert "sha256" not in created
    assert json.loads(run("list", "--json", "--keys", str(tmp_path / "k.json"))[1]) == [created]


def test_changes_are_in_the_audit_log_without_the_key(run: Run, tmp_path: Path) -> None:
    secret = run("create", "--tenant", "acme")[1].strip()
    run("revoke", digest(secret)[:12])
    text = (tmp_path / "state" / "inflight" / "audit.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    assert [event["event"] for event in events] == ["key.created", "key.revoked"]
    assert all(event["key"] == digest(secret)[:12] and event["user"] for event in events)
    assert secret not in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("create", "--tenant", "a b"), "tenant: 'a b'; allowed: "),
        (("create", "--tenant", "a", "--model", "../x"), "model: '../x'; allowed: "),
        (("revoke", "abc"), "inflight key create"),
        (("list",), "inflight key create"),
    ],
)
def test_mistakes_are_one_line(run: Run, arguments: tuple[str, ...], text: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert text in err and len(err.splitlines()) == 1
