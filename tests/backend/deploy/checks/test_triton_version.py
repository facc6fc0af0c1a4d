"""What holds for which Triton, and how its version is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.deploy import installation
from inflight.deploy.checks.triton_version import (
    FACTS,
    NUMPY_2,
    TESTED,
    VERSION_FILE,
    TritonVersion,
    version_of,
)
from inflight.errors import ConfigError

PAGE = Path(__file__).resolve().parents[4] / "docs" / "deployment.md"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.51.0\n", (2, 51, 0)),
        ("2.73.0dev", (2, 73, 0)),
        ("2.59.1", (2, 59, 1)),
        ("2.60", (2, 60, 0)),
        ("", None),
        ("latest", None),
    ],
)
def test_versions_are_parsed(text: str, version: tuple[int, int, int] | None) -> None:
    assert TritonVersion.parse(text) == version


def test_the_version_of_a_container_is_in_its_file(tmp_path: Path) -> None:
    server = tmp_path / "bin" / "tritonserver"
    assert version_of(server, is_wheel=False) is None
    (tmp_path / VERSION_FILE).write_text("2.60.0\n")
    assert version_of(server, is_wheel=False) == (2, 60, 0)
    assert version_of(server, is_wheel=True) == TESTED


def test_the_installed_wheel_is_the_tested_version() -> None:
    assert installation.find().version == TESTED


def test_numpy_2_is_refused_before_triton_2_52() -> None:
    with pytest.raises(ConfigError, match=r"Triton 2\.51\.0 silently"):
        installation.check_numpy("2.1.0", TritonVersion(2, 51, 0))
    installation.check_numpy("2.1.0", NUMPY_2.since)
    installation.check_numpy("1.26.4", TESTED)


def test_facts_are_in_order_and_after_the_tested_version() -> None:
    assert [fact.since for fact in FACTS] == sorted(fact.since for fact in FACTS)
    assert all(not fact.holds(TESTED) for fact in FACTS)


def test_the_page_has_the_same_facts() -> None:
    (section,) = re.findall(r"^## Triton versions$(.*?)^## ", PAGE.read_text(), re.M | re.S)
    rows = re.findall(r"^\| (2\.\d+) \| (\d\d\.\d\d) \| (.+) \|", section, re.MULTILINE)
    assert [(version, release) for version, release, _ in rows] == [
        (f"{fact.since.major}.{fact.since.minor}", fact.release) for fact in FACTS
    ]
