"""The level of the logs is the environment's, or an error that names the variable."""

from __future__ import annotations

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
