"""Certificates are read again when their files change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import certificates
from inflight.access.tls import TlsFiles
from inflight.door.certificate import REREAD_S, LiveCertificate
from inflight.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return certificates.make(tmp_path / "first").server


@pytest.fixture
def clock() -> Clock:
    return Clock()


def replace(files: TlsFiles, new: TlsFiles, *, key: bool = True) -> None:
    os.replace(new.cert, files.cert)
    if key:
        os.replace(new.key, files.key)


def test_new_files_are_used_after_a_second(tmp_path: Path, files: TlsFiles, clock: Clock) -> None:
    live = LiveCertificate(files, clock)
    before, context = live.contents(), live.context()
    replace(files, certificates.make(tmp_path / "second").server)
    assert live.contents() is before, "not looked at yet"
    clock.now += REREAD_S
    assert live.contents() == files.read() != before
    assert live.context() is not context
    found = live.contents()
    clock.now += REREAD_S
    assert live.contents() is found, "not read again without a change"


@pytest.mark.parametrize("damage", ["not PEM", "missing", "other key"])
def test_broken_files_leave_the_former_certificate_in_use(
    tmp_path: Path, files: TlsFiles, clock: Clock, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    live = LiveCertificate(files, clock)
    before, context = live.contents(), live.context()
    new = certificates.make(tmp_path / "second").server
    if damage == "not PEM":
        Path(files.cert).write_text("not PEM")
    elif damage == "missing":
        Path(files.key).unlink()
    else:
        replace(files, new, key=False)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            clock.now += REREAD_S
            assert live.contents() is before and live.context() is context
    assert [record.getMessage() for record in caplog.records if "stays in use" in record.message]
    assert len(caplog.records) == 1, "once for each change"
    replace(files, certificates.make(tmp_path / "third").server)
    clock.now += REREAD_S
    assert live.contents() == files.read() != before


def test_a_certificate_that_is_broken_at_the_start_is_an_error(
    files: TlsFiles, clock: Clock
) -> None:
    Path(files.key).write_text("")
    with pytest.raises(ConfigError, match="--tls-cert"):
        LiveCertificate(files, clock)
