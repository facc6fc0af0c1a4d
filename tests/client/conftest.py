"""Settings of the client's tests, and a fixture for both clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from inflight_client import AsyncClient, Client
from inflight_client.calls import retries

Use = Callable[..., Any]


@pytest.fixture(autouse=True)
def _retries_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.002)


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def use(request: pytest.FixtureRequest) -> Use:
    """use(url, action, **settings): what `action` returns for a client; awaited, if it has to
    be."""

    def run(url: str, action: Callable[[Any], Any], **settings: Any) -> Any:
        if request.param is Client:
            with Client(url, **settings) as client:
                return action(client)

        async def main() -> Any:
            async with AsyncClient(url, **settings) as client:
                found = action(client)
                return await found if inspect.isawaitable(found) else found

        return asyncio.run(main())

    return run
