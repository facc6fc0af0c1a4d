"""Who may use the server, for HTTP and gRPC alike."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from inflight.access.accounts_client import AccountsClient, Lease
from inflight.access.audit import AuditLog
from inflight.access.key import Key
from inflight.access.key_ring import KeyRing
from inflight.errors import LimitExceeded, NotPermitted, Unauthenticated, UnknownModel

_SCHEME = "bearer "

# Of HTTP or gRPC: names in lower case.
Headers = Iterable[tuple[str | bytes, str | bytes]]


class Admission:
    """Checks a door's requests; refusals are in the audit log.

    Args:
        keys: the keys file.
        accounts: the accountant's socket.
        door: its name in the audit log.
        audit_file: the audit log.

    Raises:
        ConfigError: the keys file cannot be read.
    """

    def __init__(self, keys: Path, accounts: Path, door: str, audit_file: Path) -> None:
        self._ring = KeyRing(keys)
        self._accounts = AccountsClient(accounts)
        self._door = door
        self._audit = AuditLog(audit_file)

    def identify(self, headers: Headers, *, peer: str, what: str) -> Key:
        """The key of a request, before anything else of it is read.

        Args:
            peer: the client's address.
            what: method or path.

        Raises:
            Unauthenticated: no valid key.
        """
        try:
            return self._ring.find(secret_of(headers))
        except Unauthenticated as error:
            self._refused("unauthenticated", error.reason, peer, what)
            raise

    async def begin(self, key: Key, model: str, *, peer: str, what: str) -> Lease:
        """Admit an inference request; end the lease when the request is over.

        Raises:
            UnknownModel: the key does not allow the model.
            LimitExceeded: see there.
            CapacityError: the limits cannot be checked now.
        """
        try:
            key.check_model(model)
            return await self._accounts.begin(key)
        except UnknownModel:
            self._refused("model", model, peer, what, key)
            raise
        except LimitExceeded as error:
            self._refused("limit", error.limit, peer, what, key)
            raise

    async def metrics(self) -> str:
        """By tenant, in Prometheus's text format. Raises CapacityError."""
        return await self._accounts.metrics()

    def check_admin(self, key: Key, *, peer: str, what: str) -> None:
        """Raises NotPermitted."""
        if key.role != "admin":
            self._refused("role", key.role, peer, what, key)
            raise NotPermitted("role: the key is a user's; allowed: an admin's")

    def _refused(
        self, event: str, reason: str, peer: str, what: str, key: Key | None = None
    ) -> None:
        who = {} if key is None else {"key": key.id, "tenant": key.tenant}
        place = {"door": self._door, "peer": peer, "what": what}
        self._audit.write(f"refused.{event}", reason=reason, **who, **place)


def secret_of(headers: Headers) -> str:
    """The key that a request carries.

    Raises:
        Unauthenticated: none, or several, which servers and proxies could read in different ways.
    """
    found = []
    for name, value in headers:
        name = _text(name)
        if name == "authorization":
            scheme, secret = _text(value)[: len(_SCHEME)], _text(value)[len(_SCHEME) :]
            if scheme.lower() != _SCHEME:
                raise Unauthenticated("scheme")
            found.append(secret.strip(" "))
        elif name == "x-api-key":
            found.append(_text(value))
    if len(found) != 1:
        raise Unauthenticated("several" if found else "missing")
    return found[0]


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
