"""Doors report disconnects to all fronts of a server, and never wait for one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from inflight.ipc.sockets import disconnects
from inflight.ipc.sockets.disconnects import DisconnectListener, DisconnectReporter, new_ticket


@pytest.fixture
def reported() -> SimpleQueue[Collection[str]]:
    return SimpleQueue()


@pytest.fixture
def listener(
    tmp_path: Path, reported: SimpleQueue[Collection[str]]
) -> Iterator[DisconnectListener]:
    found = DisconnectListener(tmp_path, reported.put)
    yield found
    found.close()


def test_a_ticket_is_reported_and_remembered(
    listener: DisconnectListener, reported: SimpleQueue[Collection[str]], tmp_path: Path
) -> None:
    ticket = new_ticket()
    DisconnectReporter(tmp_path).report(ticket)
    assert reported.get(timeout=60) == [ticket]
    assert listener.has_left(ticket) and not listener.has_left(new_ticket())


def test_only_so_many_tickets_are_remembered(
    listener: DisconnectListener,
    reported: SimpleQueue[Collection[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disconnects, "_MAX_REMEMBERED", 2)
    reporter = DisconnectReporter(tmp_path)
    for ticket in "abc":
        reporter.report(ticket)
        assert reported.get(timeout=60) == [ticket]
    assert [listener.has_left(ticket) for ticket in "abc"] == [False, True, True]


def test_what_a_busy_front_does_not_take_is_sent_again(tmp_path: Path) -> None:
    """Its queue holds some 10 or 500 datagrams."""
    sent = [str(number) for number in range(2000)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as front:
        front.bind(str(tmp_path / "stub-1.disconnects"))
        front.settimeout(60)

        async def run() -> list[str]:
            reporter = DisconnectReporter(tmp_path)
            for ticket in sent:
                reporter.report(ticket)
            found: list[str] = []
            while len(found) < len(sent):
                data = await asyncio.to_thread(front.recv, 1 << 16)
                found += data.decode().split()
            return found

        assert asyncio.run(run()) == sent


def test_a_front_that_is_gone_delays_no_other(
    listener: DisconnectListener, reported: SimpleQueue[Collection[str]], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(tmp_path / "a.disconnects"))
    reporter = DisconnectReporter(tmp_path)
    for ticket in "ab":
        reporter.report(ticket)
        assert reported.get(timeout=60) == [ticket]


def test_a_closed_front_leaves_no_file(
    tmp_path: Path, reported: SimpleQueue[Collection[str]]
) -> None:
    DisconnectListener(tmp_path, reported.put).close()
    assert list(tmp_path.iterdir()) == []
    DisconnectReporter(tmp_path).report("a")


def test_without_a_socket_the_front_works_on(
    tmp_path: Path,
    reported: SimpleQueue[Collection[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = DisconnectListener(tmp_path / "missing", reported.put)
    assert "disconnects are not noticed" in caplog.text
    assert not listener.has_left("a")
    listener.close()
