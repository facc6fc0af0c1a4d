"""The keys of a running server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from inflight.access import keys_file
from inflight.access.key import issue
from inflight.access.key_ring import REREAD_S, KeyRing
from inflight.errors import ConfigError, Unauthenticated


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_found_by_its_secret(path: Path) -> None:
    key, secret = issue("acme")
    keys_file.add(path, key)
    keys_file.add(path, issue("other")[0])
    assert KeyRing(path).find(secret) == key


def test_other_secrets_are_refused_with_one_text_and_several_reasons(path: Path) -> None:
    key, secret = issue("acme", expires_in_s=0)
    keys_file.add(path, key)
    ring = KeyRing(path)
    changed = secret[:-1] + ("a" if secret[-1] != "a" else "b")
    reasons, texts = [], set()
    for wrong in ("", "inf-", "x" * 47, secret + "a", changed, secret, f"{secret[:-1]}\udcff"):
        with pytest.raises(Unauthenticated) as refused:
            ring.find(wrong)
        reasons.append(refused.value.reason)
        texts.add(str(refused.value))
    assert reasons == [*["malformed"] * 4, "unknown", f"expired: {key.id}", "unknown"]
    assert len(texts) == 1
    assert secret not in texts.pop()


def test_the_hash_alone_is_no_key(path: Path) -> None:
    key, _ = issue("acme")
    keys_file.add(path, key)
    with pytest.raises(Unauthenticated):
        KeyRing(path).find(f"inf-{key.sha256[:43]}")


def test_a_change_of_the_file_is_seen(path: Path) -> None:
    (first, one), (second, other) = issue("acme"), issue("acme")
    keys_file.add(path, first)
    clock = Clock()
    ring = KeyRing(path, clock)
    keys_file.add(path, second)
    keys_file.revoke(path, first.id)
    assert ring.find(one) == first  # not looked yet
    clock.now += REREAD_S
    assert ring.find(other) == second
    with pytest.raises(Unauthenticated):
        ring.find(one)


@pytest.mark.parametrize("break_it", [lambda p: p.write_text("{"), Path.unlink])
def test_a_broken_file_leaves_the_keys_and_logs_an_error(
    path: Path, caplog: pytest.LogCaptureFixture, break_it: object
) -> None:
    key, secret = issue("acme")
    keys_file.add(path, key)
    clock = Clock()
    ring = KeyRing(path, clock)
    break_it(path)  # type: ignore[operator]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            clock.now += REREAD_S
            assert ring.find(secret) == key
    assert len(caplog.records) == 1
    assert "the keys stay as they were" in caplog.text
    path.unlink(missing_ok=True)
    keys_file.add(path, issue("other")[0])
    clock.now += REREAD_S
    with pytest.raises(Unauthenticated):
        ring.find(secret)


def test_a_server_does_not_start_with_a_broken_file(path: Path) -> None:
    with pytest.raises(ConfigError):
        KeyRing(path)
