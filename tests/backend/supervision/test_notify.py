"""systemd hears of the server's states."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from inflight.supervision.notify import notify


def test_assignments_arrive_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1", "STATUS=serves")
        assert systemd.recv(1024) == b"READY=1\nSTATUS=serves"


def test_the_abstract_namespace_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("")  # the kernel chooses an abstract name
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + systemd.getsockname()[1:].decode())
        notify("STOPPING=1")
        assert systemd.recv(1024) == b"STOPPING=1"


@pytest.mark.parametrize("address", [None, "", "relative", "/nowhere/notify"])
def test_without_systemd_nothing_happens(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")
