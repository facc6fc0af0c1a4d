"""The JSON file of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_reports import random_level, report
from inflight.cli.bench.serving.results.report import read, write
from inflight.cli.bench.serving.results.slo import parse
from inflight.errors import ConfigError


def test_a_report_is_read_as_written(tmp_path: Path) -> None:
    found = report(random_level(1, 0.01, slo=parse("ttft=60")), random_level(4, 0.02))
    write(found, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == found


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "is not a report of `inflight bench serve --json`"),
        ('{"date": 5}', "is not a report"),
        (None, "has the format 'another'"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str | None, error: str) -> None:
    path = tmp_path / "a.json"
    if text is None:
        write(report(), path)
        text = json.dumps({**json.loads(path.read_text()), "format": "another"})
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read(path)


def test_a_missing_file_and_a_full_disk_are_plain_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "nope.json")
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
        write(report(), Path("/dev/full"))
