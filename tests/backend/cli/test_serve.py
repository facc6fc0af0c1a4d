"""`inflight serve`, without a server."""

from __future__ import annotations

import pytest

from inflight.access.options import AccessOptions
from inflight.access.tls import TlsFiles
from inflight.cli.serve import exposure

TLS = TlsFiles("cert.pem", "key.pem")


@pytest.mark.parametrize(
    ("address", "access", "text"),
    [
        ("127.0.0.1:8000", AccessOptions(), ""),
        ("::1:8000", AccessOptions(), ""),
        ("127.0.0.1:8000", AccessOptions(keys="k"), ""),
        ("0.0.0.0:8000", AccessOptions(), "all who can reach 0.0.0.0 can use the server"),
        ("10.0.0.1:8000", AccessOptions(tls=TLS), "restrict it with --keys"),
        ("0.0.0.0:8000", AccessOptions(keys="k"), "keys are sent without encryption"),
        ("0.0.0.0:8000", AccessOptions(keys="k", tls=TLS), ""),
    ],
)
def test_a_server_that_others_can_use_is_warned_about(
    address: str, access: AccessOptions, text: str
) -> None:
    found = exposure(address, access)
    assert text in found and bool(text) == bool(found)
