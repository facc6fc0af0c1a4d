"""API keys."""

from __future__ import annotations

import re
import time

import pytest

from inflight.access.key import KeyLimits, digest, issue
from inflight.errors import ConfigError, UnknownModel


def test_a_secret_has_a_prefix_for_scanners_and_256_bits() -> None:
    secrets = {issue("acme")[1] for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch("inf-[A-Za-z0-9]{43}", secret) for secret in secrets)


def test_a_key_holds_the_hash_and_nothing_of_the_secret() -> None:
    key, secret = issue("acme")
    assert key.sha256 == digest(secret)
    assert key.id == key.sha256[:12]
    assert secret.removeprefix("inf-") not in repr(key)


@pytest.mark.parametrize("tenant", ["", "a b", "a/b", "x" * 65, "a\n", "ä", "a\0"])
def test_a_tenant_has_a_plain_name(tenant: str) -> None:
    with pytest.raises(ConfigError, match=r"tenant: .*allowed"):
        issue(tenant)


def test_a_model_has_a_valid_name() -> None:
    with pytest.raises(ConfigError, match=r"model: .*allowed"):
        issue("acme", models=("../x",))


def test_a_key_expires() -> None:
    assert issue("acme", expires_in_s=0)[0].has_expired()
    assert not issue("acme", expires_in_s=60)[0].has_expired()
    assert not issue("acme")[0].has_expired()
    before = time.time()
    expires = issue("acme", expires_in_s=60)[0].expires
    assert expires is not None and before + 58 <= expires <= time.time() + 62


def test_a_key_without_models_allows_all() -> None:
    issue("acme")[0].check_model("anything")


def test_a_key_with_models_allows_these() -> None:
    key, _ = issue("acme", models=("chat", "generate"))
    key.check_model("chat")
    with pytest.raises(UnknownModel, match="'llm' is unknown to this key; allowed: chat, generate"):
        key.check_model("llm")


def test_limits_are_falsy_without_any() -> None:
    assert not KeyLimits()
    assert KeyLimits(concurrent_requests=1)
