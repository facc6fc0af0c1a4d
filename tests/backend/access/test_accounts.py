"""Limits of keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inflight.access.accounts import Accounts
from inflight.access.key import KeyLimits
from inflight.access.ledger import Ledger, read
from inflight.ipc.metrics.usage import Usage

FREE = KeyLimits()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path)


def test_requests_of_a_minute_are_limited_for_each_account(ledger: Ledger) -> None:
    limits = KeyLimits(requests_per_minute=2)

    async def run() -> None:
        accounts = Accounts(ledger)
        verdicts = [await accounts.begin("a/1", limits) for _ in range(4)]
        assert [verdict.limit for verdict in verdicts] == ["", "", *["requests_per_minute"] * 2]
        assert verdicts[-1].value == 2
        assert 1 <= verdicts[-1].retry_after_s <= 60
        assert (await accounts.begin("a/2", limits)).limit == ""

    asyncio.run(run())


def test_tokens_are_charged_when_they_are_known(ledger: Ledger) -> None:
    limits = KeyLimits(tokens_per_minute=100)

    async def run() -> None:
        accounts = Accounts(ledger)
        assert (await accounts.begin("a/1", limits)).limit == ""
        await accounts.used(Usage("a/1", 60, 39))
        assert (await accounts.begin("a/1", limits)).limit == ""  # one token is left
        await accounts.used(Usage("a/1", 0, 500))  # of a request that was admitted
        refused = await accounts.begin("a/1", limits)
        assert (refused.limit, refused.value) == ("tokens_per_minute", 100)
        assert 1 <= refused.retry_after_s <= 60
        assert (await accounts.begin("a/2", limits)).limit == ""

    asyncio.run(run())


def test_concurrent_requests_are_limited_until_they_end(ledger: Ledger) -> None:
    limits = KeyLimits(concurrent_requests=2)

    async def run() -> None:
        accounts = Accounts(ledger)
        verdicts = await asyncio.gather(*(accounts.begin("a/1", limits) for _ in range(5)))
        assert sorted(verdict.limit for verdict in verdicts) == [
            *[""] * 2,
            *["concurrent_requests"] * 3,
        ]
        accounts.end("a/1")
        assert (await accounts.begin("a/1", limits)).limit == ""
        accounts.end("a/1", 2)
        assert accounts.num_in_flight("a/1") == 0

    asyncio.run(run())


def test_refused_requests_are_not_in_flight(ledger: Ledger) -> None:
    limits = KeyLimits(requests_per_minute=1, concurrent_requests=2)

    async def run() -> None:
        accounts = Accounts(ledger)
        for _ in range(5):
            await accounts.begin("a/1", limits)
        assert accounts.num_in_flight("a/1") == 1

    asyncio.run(run())


def test_everything_is_recorded(ledger: Ledger, path: Path) -> None:
    async def run() -> None:
        accounts = Accounts(ledger)
        await accounts.begin("a/1", KeyLimits(requests_per_minute=1))
        await accounts.begin("a/1", KeyLimits(requests_per_minute=1))
        await accounts.begin("b/2", FREE)
        await accounts.used(Usage("a/1", 7, 5))

    asyncio.run(run())
    ledger.flush()
    found = {(day.tenant, day.key): day for day in read(path)}
    first, second = found["a", "1"], found["b", "2"]
    assert (first.requests, first.refused) == (1, 1)
    assert (first.prompt_tokens, first.generated_tokens) == (7, 5)
    assert (second.requests, second.refused) == (1, 0)
