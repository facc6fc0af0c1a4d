"""What the tests of several doors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keys import KeyDesk, desk


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyDesk]:
    with desk(tmp_path_factory.mktemp("keys")) as found:
        yield found
