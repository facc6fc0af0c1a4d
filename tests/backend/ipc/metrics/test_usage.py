"""Reports of usage."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.ipc.metrics import usage
from inflight.ipc.metrics.usage import MAX_ACCOUNTS, Usage, UsageReporter


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(usage.usage_path(tmp_path)))
        found.settimeout(60)
        yield found


def test_usage_of_an_account_is_one_entry(tmp_path: Path, receiver: socket.socket) -> None:
    reporter = UsageReporter(usage.usage_path(tmp_path))
    reporter.add("a/1", 10, 0)
    reporter.add("b/2", 1, 1)
    reporter.add("a/1", 0, 7)
    reporter.report()
    assert usage.decode(receiver.recv(1 << 16)) == [Usage("a/1", 10, 7), Usage("b/2", 1, 1)]
    reporter.report()
    receiver.setblocking(False)
    with pytest.raises(BlockingIOError):
        receiver.recv(1)
    reporter.close()


def test_what_has_no_receiver_is_kept(tmp_path: Path) -> None:
    path = usage.usage_path(tmp_path)
    reporter = UsageReporter(path)
    reporter.add("a/1", 1, 2)
    reporter.report()
    reporter.add("a/1", 1, 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late:
        late.bind(str(path))
        reporter.report()
        assert usage.decode(late.recv(1 << 16)) == [Usage("a/1", 2, 4)]
    reporter.close()


def test_many_accounts_are_several_reports(tmp_path: Path, receiver: socket.socket) -> None:
    reporter = UsageReporter(usage.usage_path(tmp_path))
    for number in range(MAX_ACCOUNTS + 1):
        reporter.add(f"{'t' * 64}/{number:012}", 1, 1)
    reporter.report()
    sizes = [len(usage.decode(receiver.recv(1 << 16))) for _ in range(2)]
    assert sizes == [MAX_ACCOUNTS, 1]
    reporter.close()
