"""Certificates of an authority of the test's own."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

from inflight.access.tls import TlsFiles


@dataclass
class Certificates:
    """PEM files.

    Attributes:
        ca: the authority's certificate.
        server: of 127.0.0.1 and localhost.
        client: certificate and key of a client.
        stranger: the same, of another authority.
    """

    ca: Path
    server: TlsFiles
    client: tuple[Path, Path]
    stranger: tuple[Path, Path]

    @property
    def options(self) -> tuple[str, ...]:
        """Of a door, without certificates of clients."""
        return ("--tls-cert", self.server.cert, "--tls-key", self.server.key)

    def context(self, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Of a client."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if client is not None:
            context.load_cert_chain(*client)
        return context


def make(folder: Path) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    files = {}
    for name, issuer, host in (
        ("server", authority, "127.0.0.1"),
        ("client", authority, "client.test"),
        ("stranger", other, "client.test"),
    ):
        issued = issuer.issue_cert(host)
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        files[name] = (folder / f"{name}.pem", folder / f"{name}.key")
    cert, key = files["server"]
    server = TlsFiles(str(cert), str(key))
    return Certificates(folder / "ca.pem", server, files["client"], files["stranger"])
