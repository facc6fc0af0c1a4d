"""The level of the logs is the environment's, or an error that names the variable."""

from __future__ import annotations

import datetime
import io
import json
import logging
import time
import unicodedata
from collections.abc import Callable

import pytest

from inflight import log
from inflight.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "level"), [(None, "INFO"), ("debug", "DEBUG"), ("ERROR", "ERROR")]
)
def test_the_environment_says_the_level(
    name: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(log.LEVEL_VARIABLE, raising=False)
    if name is not None:
        monkeypatch.setenv(log.LEVEL_VARIABLE, name)
    assert log.level() == level


def test_a_level_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.LEVEL_VARIABLE, "foo")
    with pytest.raises(ConfigError, match="INFLIGHT_LOG_LEVEL: 'foo' is unknown; allowed: DEBUG"):
        log.begin()


HOSTILE = 'x\n2026-01-01 00:00:00,000 INFO root: forged\r\x1b[31m\x00\x7f\x85\u2028\u2029"}{"é'


def lines(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, report: Callable[[logging.Logger], None]
) -> list[str]:
    """What a logger writes, line by line as any reader may split them."""
    monkeypatch.delenv(log.FORMAT_VARIABLE, raising=False)
    if kind is not None:
        monkeypatch.setenv(log.FORMAT_VARIABLE, kind)
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(log.formatter())
    logger = logging.Logger("inflight.test")
    logger.addHandler(handler)
    report(logger)
    return written.getvalue().splitlines()


def test_json_is_one_object_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines(monkeypatch, "json", lambda logger: logger.warning("%d of %s", 3, "it"))
    found = json.loads(line)
    assert set(found) == {"time", "level", "logger", "message"}
    assert (found["level"], found["logger"]) == ("WARNING", "inflight.test")
    assert found["message"] == "3 of it"
    assert abs(datetime.datetime.fromisoformat(found["time"]).timestamp() - time.time()) < 60


def test_json_names_the_request_and_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(logger: logging.Logger) -> None:
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("failed", extra={"request_id": "f00"})

    (line,) = lines(monkeypatch, "json", report)
    found = json.loads(line)
    assert found["request_id"] == "f00"
    assert found["exception"].startswith("Traceback") and HOSTILE in found["exception"]


@pytest.mark.parametrize("kind", [None, "text", "json"])
def test_a_message_cannot_forge_a_record(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    (line,) = lines(monkeypatch, kind, lambda logger: logger.info("%s", HOSTILE))
    assert not any(unicodedata.category(one) in ("Cc", "Zl", "Zp") for one in line)
    if kind == "json":
        assert json.loads(line)["message"] == HOSTILE
    else:
        assert r"x\n2026-01-01" in line


def test_a_format_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.FORMAT_VARIABLE, "xml")
    with pytest.raises(ConfigError, match="INFLIGHT_LOG_FORMAT: 'xml' is unknown; allowed: text, "):
        log.begin()
