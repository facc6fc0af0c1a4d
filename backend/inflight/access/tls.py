"""TLS of the doors: certificates in PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from inflight.core.file_signature import Signature, signature
from inflight.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True):
    """The server's certificate.

    Attributes:
        cert: the certificate and its chain.
        key: its private key, without a passphrase.
        client_ca: clients need a certificate of one of these; None: they need none.
    """

    cert: str
    key: str
    client_ca: str | None = None

    def context(self) -> ssl.SSLContext:
        """For a server that speaks TLS 1.2 and 1.3.

        Raises:
            ConfigError: a file cannot be used; names it.
        """
        self.read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # Without a passphrase here, OpenSSL would prompt for one on the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
        except (ssl.SSLError, ValueError):
            raise ConfigError(
                f"--tls-cert, --tls-key: {self.cert} and {self.key} are not a certificate and its "
                "private key; allowed: PEM files without a passphrase"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError:
                raise ConfigError(
                    f"--tls-client-ca: {self.client_ca} has no certificates; allowed: a PEM file"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def signature(self) -> tuple[Signature, ...]:
        """What changes whenever one of the files is replaced or written."""
        paths = (self.cert, self.key, self.client_ca)
        return tuple(signature(Path(path)) for path in paths if path is not None)

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Contents of the certificate, the key and the clients' authorities. Raises ConfigError."""
        cert, key = _content("--tls-cert", self.cert), _content("--tls-key", self.key)
        if self.client_ca is None:
            return cert, key, None
        return cert, key, _content("--tls-client-ca", self.client_ca)


def chosen(cert: str | None, key: str | None, client_ca: str | None) -> TlsFiles | None:
    """The files that were given; None without any.

    Raises:
        ConfigError: one is missing.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: one is missing; allowed: both or none")
    return TlsFiles(cert, key, client_ca)


def _content(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}") from None
