"""A limit on open files that a server cannot live with is refused at its start."""

from __future__ import annotations

import resource

import pytest

from inflight.deploy import file_limit
from inflight.errors import ConfigError

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised_to"),
    [
        ((1024, 524_288), 65_536),
        ((1024, 4096), 4096),
        ((1024, INFINITE), 65_536),
        ((1_000_000, 1_000_000), None),
        ((INFINITE, INFINITE), None),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_allowed(
    limits: tuple[int, int], raised_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda what, to: calls.append((what, to)))
    file_limit.raise_file_limit()
    expected = [] if raised_to is None else [(resource.RLIMIT_NOFILE, (raised_to, limits[1]))]
    assert calls == expected


def test_too_low_a_hard_limit_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 64))
    with pytest.raises(ConfigError, match=r"at most 64 files may be open \(ulimit -n\)"):
        file_limit.raise_file_limit()
