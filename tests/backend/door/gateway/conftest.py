"""A gateway for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway import Gateway, a_gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with a_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running
