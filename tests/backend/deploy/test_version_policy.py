"""Which versions a policy selects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.deploy.version_policy import DEFAULT, VersionPolicy, read_policy
from inflight.errors import ConfigError

VERSIONS = st.sets(st.integers(0, 1000), max_size=20)


@given(available=VERSIONS, number=st.integers(1, 30))
def test_latest_selects_the_highest(available: set[int], number: int) -> None:
    found = VersionPolicy(latest=number).select(available)
    assert found == sorted(found) and set(found) <= available
    assert len(found) == min(number, len(available))
    assert all(one > max(found, default=0) or one < found[0] for one in available - set(found))


@given(available=VERSIONS)
def test_all_selects_all(available: set[int]) -> None:
    assert VersionPolicy(latest=0).select(available) == sorted(available)


@given(available=VERSIONS, specific=st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_specific_selects_these_or_names_one_that_does_not_exist(
    available: set[int], specific: list[int]
) -> None:
    policy = VersionPolicy(specific=tuple(specific))
    missing = set(specific) - available
    if missing:
        with pytest.raises(ConfigError, match=f"version {min(missing)} does not exist; allowed: "):
            policy.select(available)
    else:
        assert policy.select(available) == sorted(set(specific))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", DEFAULT),
        ("# version_policy: see the manual", DEFAULT),
        ("version_policy { latest { num_versions: 1 } }", DEFAULT),
        ("version_policy { latest {} }", DEFAULT),
        ("version_policy: { latest: { num_versions: 3 } }", VersionPolicy(latest=3)),
        ("version_policy { all {} }", VersionPolicy(latest=0)),
        ("version_policy { specific { versions: [ 1, 3 ] } }", VersionPolicy(specific=(1, 3))),
    ],
)
def test_a_policy_is_read_from_the_configuration(
    tmp_path: Path, text: str, policy: VersionPolicy
) -> None:
    (tmp_path / "config.pbtxt").write_text(f'backend: "inflight"\n{text}\n')
    assert read_policy(tmp_path) == policy
    assert policy.is_side_by_side == (policy != DEFAULT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version_policy { newest {} }", "config.pbtxt: not valid"),
        ("version_policy { specific {} }", "specific has no versions; allowed: one or more"),
    ],
)
def test_a_policy_that_is_not_one_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_policy(tmp_path)
