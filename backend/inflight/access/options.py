"""Options of a door: who may use the server, and its certificate."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from inflight.access import keys_file, tls
from inflight.access.admission import Admission
from inflight.access.tls import TlsFiles
from inflight.errors import ConfigError


class AccessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a server.

    Attributes:
        keys: the keys file; None: no key is needed.
        accounts: the accountant's socket, if there are keys.
        audit: the audit log; None for no log.
        tls: None for no TLS.
    """

    keys: str | None = None
    accounts: str | None = None
    audit: str | None = None
    tls: TlsFiles | None = None

    @property
    def needs_doors(self) -> bool:
        """Whether all requests have to pass a door, which checks them."""
        return self.keys is not None or self.tls is not None

    def check(self) -> None:
        """Raises ConfigError if a file cannot be used."""
        if self.keys is not None:
            keys_file.read(Path(self.keys))
        if self.tls is not None:
            self.tls.context()

    def arguments(self) -> list[str]:
        """For a door's command line."""
        named = {"keys": self.keys, "accounts": self.accounts, "audit": self.audit}
        if self.tls is not None:
            named |= {"tls-cert": self.tls.cert, "tls-key": self.tls.key}
            named |= {"tls-client-ca": self.tls.client_ca}
        return [
            word
            for name, value in named.items()
            if value is not None
            for word in (f"--{name}", value)
        ]

    def admission(self, door: str) -> Admission | None:
        """What checks a door's requests; None without keys.

        Raises:
            ConfigError: the keys file cannot be read.
        """
        if self.keys is None or self.accounts is None:
            return None
        audit = Path(self.audit or os.devnull)
        return Admission(Path(self.keys), Path(self.accounts), door, audit)


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", metavar="FILE", help="API keys; others are refused")
    parser.add_argument("--accounts", metavar="SOCKET", help="of the accountant")
    parser.add_argument("--audit", metavar="FILE", help="the audit log")
    parser.add_argument("--tls-cert", metavar="FILE")
    parser.add_argument("--tls-key", metavar="FILE")
    parser.add_argument("--tls-client-ca", metavar="FILE")


def chosen(found: argparse.Namespace) -> AccessOptions:
    """Raises ConfigError."""
    if (found.keys is None) != (found.accounts is None):
        raise ConfigError("--keys and --accounts: one is missing; allowed: both or none")
    return AccessOptions(
        keys=found.keys,
        accounts=found.accounts,
        audit=found.audit,
        tls=tls.chosen(found.tls_cert, found.tls_key, found.tls_client_ca),
    )
