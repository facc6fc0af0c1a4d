"""Who may use the server."""

from __future__ import annotations

import pytest

from inflight.access.admission import secret_of
from inflight.errors import Unauthenticated


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer inf-x")],
        [("authorization", "bearer   inf-x ")],
        [(b"authorization", b"Bearer inf-x"), (b"accept", b"*/*")],
        [("x-api-key", "inf-x")],
    ],
)
def test_a_key_is_found_in_headers_and_metadata(
    headers: list[tuple[str | bytes, str | bytes]],
) -> None:
    assert secret_of(headers) == "inf-x"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "missing"),
        ([("authorization", "Basic abc")], "scheme"),
        ([("authorization", "inf-x")], "scheme"),
        ([("authorization", "Bearer a"), ("authorization", "Bearer a")], "several"),
        ([("x-api-key", "a"), ("authorization", "Bearer a")], "several"),
        ([("x-api-key", ""), ("authorization", "Bearer a")], "several"),
        ([("authorization", "Bearer a"), ("authorization", "Basic a")], "scheme"),
    ],
)
def test_none_or_several_are_refused(headers: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        secret_of(headers)
    assert refused.value.reason == reason
