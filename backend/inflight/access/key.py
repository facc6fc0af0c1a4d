"""API keys: what a key allows, and the secret that proves it."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import time
from typing import Annotated, Literal

import msgspec

from inflight.errors import ConfigError, UnknownModel

# Secret scanners find keys by it: `inf-[A-Za-z0-9]{43}`.
PREFIX = "inf-"
NUM_CHARACTERS = 43  # 256 bits
ID_DIGITS = 12
TENANT = r"[A-Za-z0-9_.-]{1,64}"
MODEL = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
# Between a tenant and a key's id, in the name of an account.
ACCOUNT_SEPARATOR = "/"

Role = Literal["user", "admin"]
Bound = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one key; None is no limit.

    Attributes:
        requests_per_minute: inference requests.
        tokens_per_minute: tokens of prompts and outputs.
        concurrent_requests: requests in flight.
    """

    requests_per_minute: Bound | None = None
    tokens_per_minute: Bound | None = None
    concurrent_requests: Bound | None = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS = KeyLimits()


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key as stored: without its secret.

    Attributes:
        sha256: of the secret, in hexadecimal.
        tenant: on whose account its requests run.
        role: an admin may also read metrics.
        created, expires: in seconds since 1970; expires is None for never.
        models: that it may use; empty for all.
        limits: of this key; each key of a tenant has its own.
    """

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Annotated[str, msgspec.Meta(pattern=rf"^{TENANT}\Z")]
    created: int
    role: Role = "user"
    expires: int | None = None
    models: tuple[Annotated[str, msgspec.Meta(pattern=rf"^{MODEL}\Z")], ...] = ()
    limits: KeyLimits = NO_LIMITS

    @property
    def id(self) -> str:
        """Names the key in lists and logs; of no use without the secret."""
        return self.sha256[:ID_DIGITS]

    @property
    def account(self) -> str:
        """What usage is recorded under: the tenant and the key."""
        return f"{self.tenant}{ACCOUNT_SEPARATOR}{self.id}"

    def has_expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raises UnknownModel, which does not show whether there is such a model."""
        if not self.allows(model):
            raise UnknownModel(
                f"model_name: {model!r} is unknown to this key; allowed: {', '.join(self.models)}"
            )


def issue(
    tenant: str,
    *,
    role: Role = "user",
    expires_in_s: float | None = None,
    models: tuple[str, ...] = (),
    limits: KeyLimits = NO_LIMITS,
) -> tuple[Key, str]:
    """A new key and its secret, which is not stored anywhere.

    Raises:
        ConfigError: the tenant or a model has no valid name.
    """
    if not re.fullmatch(TENANT, tenant):
        raise ConfigError(f"tenant: {tenant!r}; allowed: 1 to 64 letters, digits, '_', '-' and '.'")
    for model in models:
        if not re.fullmatch(MODEL, model):
            raise ConfigError(
                f"model: {model!r}; allowed: 1 to 128 letters, digits, '_', '-' and '.'"
            )
    alphabet = string.ascii_letters + string.digits
    secret = PREFIX + "".join(secrets.choice(alphabet) for _ in range(NUM_CHARACTERS))
    now = int(time.time())
    key = Key(
        sha256=digest(secret),
        tenant=tenant,
        created=now,
        role=role,
        expires=None if expires_in_s is None else now + int(expires_in_s),
        models=models,
        limits=limits,
    )
    return key, secret


def digest(secret: str) -> str:
    """As stored. Secrets are random, so a fast hash without salt is enough."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
