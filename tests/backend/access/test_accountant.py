"""The accountant as a process, and the doors' connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.access import ledger
from inflight.access.accounts_client import AccountsClient, Lease
from inflight.access.key import Key, KeyLimits, issue
from inflight.errors import CapacityError, LimitExceeded
from inflight.ipc.metrics import usage
from inflight.ipc.metrics.usage import UsageReporter
from keys import KeyDesk, desk
from waiting import PATIENCE_S, wait_until


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[KeyDesk]:
    with desk(tmp_path / "run") as found:
        yield found


Open = Callable[[], AccountsClient]


@contextlib.asynccontextmanager
async def clients(keys: KeyDesk) -> AsyncIterator[Open]:
    """Connections to the accountant."""
    found = []

    def one() -> AccountsClient:
        found.append(AccountsClient(keys.folder / "accounts.sock"))
        return found[-1]

    yield one
    for client in found:
        client.close()
    await asyncio.sleep(0)


def key(**limits: int) -> Key:
    return issue("acme", limits=KeyLimits(**limits))[0]


def run(keys: KeyDesk, work: Callable[[Open], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), clients(keys) as client:
            await work(client)

    asyncio.run(main())


async def outcome(accounts: AccountsClient, one: Key) -> Lease | str:
    try:
        return await accounts.begin(one)
    except LimitExceeded as error:
        return error.limit


def test_limits_hold_for_several_connections(keys: KeyDesk) -> None:
    async def work(client: Open) -> None:
        one, doors = key(concurrent_requests=3), [client() for _ in range(3)]
        found = await asyncio.gather(*(outcome(door, one) for door in doors * 4))
        leases = [lease for lease in found if isinstance(lease, Lease)]
        assert len(leases) == 3
        assert found.count("concurrent_requests") == 9
        leases[0].end()
        leases[0].end()  # twice counts once
        again = await asyncio.gather(*(outcome(door, one) for door in doors))
        # The end came on one connection; the others may have been served before it.
        assert sum(isinstance(lease, Lease) for lease in again) <= 1
        await asyncio.sleep(0.1)

    run(keys, work)


def test_what_a_lost_door_held_is_free(keys: KeyDesk) -> None:
    async def work(client: Open) -> None:
        one, lost, other = key(concurrent_requests=1), client(), client()
        await lost.begin(one)
        assert await outcome(other, one) == "concurrent_requests"
        lost.close()
        while not isinstance(await outcome(other, one), Lease):
            await asyncio.sleep(0.02)

    run(keys, work)


def test_a_request_cancelled_while_it_is_admitted_holds_nothing(keys: KeyDesk) -> None:
    async def work(client: Open) -> None:
        one, accounts = key(concurrent_requests=1), client()
        (await accounts.begin(one)).end()
        for delay in [0.0] * 20 + [0.0001 * step for step in range(20)]:
            task = asyncio.create_task(outcome(accounts, one))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                lease = await task
                if isinstance(lease, Lease):
                    lease.end()
        while not isinstance(await outcome(accounts, one), Lease):
            await asyncio.sleep(0.02)

    run(keys, work)


def test_without_an_accountant_nothing_is_admitted(keys: KeyDesk, tmp_path: Path) -> None:
    async def work(client: Open) -> None:
        with pytest.raises(CapacityError, match="retry later"):
            await AccountsClient(tmp_path / "no.sock").begin(key())
        accounts = client()
        lease = await accounts.begin(key())
        assert keys.process is not None
        keys.process.kill()
        keys.process.wait()
        await asyncio.sleep(0.05)
        with pytest.raises(CapacityError, match="retry later"):
            await accounts.begin(key())
        lease.end()
        keys.start_again()
        await accounts.begin(key())

    run(keys, work)


def test_reports_of_fronts_are_charged_and_recorded(keys: KeyDesk) -> None:
    async def work(client: Open) -> None:
        one, accounts = key(tokens_per_minute=100), client()
        (await accounts.begin(one)).end()
        reporter = UsageReporter(usage.usage_path(keys.folder))
        reporter.add(one.account, 90, 0)
        reporter.add(one.account, 10, 20)
        reporter.report()
        while 'generation_tokens_total{tenant="acme"} 20.0' not in await accounts.metrics():
            await asyncio.sleep(0.02)
        assert await outcome(accounts, one) == "tokens_per_minute"
        reporter.close()

    run(keys, work)
    keys.stop()
    (day,) = ledger.read(keys.ledger, "acme")
    assert (day.requests, day.refused) == (1, 1)
    assert (day.prompt_tokens, day.generated_tokens) == (100, 20)
    keys.start()


def test_the_ledger_is_written_within_seconds(keys: KeyDesk) -> None:
    async def work(client: Open) -> None:
        await client().begin(key())

    run(keys, work)
    wait_until(lambda: ledger.read(keys.ledger))
    assert [day.requests for day in ledger.read(keys.ledger)] == [1]


def test_metrics_and_verdicts_come_in_order(keys: KeyDesk) -> None:
    async def work(client: Open) -> None:
        one, accounts = key(concurrent_requests=2), client()
        found = await asyncio.gather(
            *(outcome(accounts, one) if step % 2 else accounts.metrics() for step in range(8))
        )
        assert [isinstance(text, str) for text in found[::2]] == [True] * 4
        assert sum(isinstance(lease, Lease) for lease in found) == 2
        text = await accounts.metrics()
        assert 'inflight_tenant_requests_total{tenant="acme"} 2.0' in text
        labels = 'limit="concurrent_requests",tenant="acme"'
        assert f"inflight_tenant_refused_total{{{labels}}} 2.0" in text
        assert "_created" not in text

    run(keys, work)


def test_its_sockets_are_private(keys: KeyDesk) -> None:
    for name in ("accounts.sock", "usage.sock"):
        assert stat.S_IMODE((keys.folder / name).stat().st_mode) == 0o600


def test_malformed_messages_end_the_connection_alone(keys: KeyDesk) -> None:
    for data in (b"x\n", b'{"type":"Begin"}\n', b"a" * 100_000):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(keys.folder / "accounts.sock"))
            connection.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                connection.sendall(data)
                assert connection.recv(100) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"\xff" * 100, b"\x91\x01"):
            sender.sendto(data, str(keys.folder / "usage.sock"))

    async def work(client: Open) -> None:
        assert isinstance(await outcome(client(), key()), Lease)

    run(keys, work)
