"""Triton's names of versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.model_version import public_name, split_version, versioned

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(name=NAMES, version=st.integers(0, 2**60))
def test_a_name_and_a_version_are_found_again(name: str, version: int) -> None:
    assert split_version(versioned(name, version)) == (name, version)
    assert public_name(versioned(name, version)) == name
    assert split_version(name) == (name, None)
    assert public_name(name) == name


@pytest.mark.parametrize("name", ["a@", "a@b", "a@1.5", "a@-1", "@"])
def test_what_is_no_version_is_part_of_the_name(name: str) -> None:
    assert split_version(name) == (name, None)
