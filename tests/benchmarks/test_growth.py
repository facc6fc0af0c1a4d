"""The count of files that an addition touches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import growth
from inflight.deploy import generate


def commit(checkout: Path, files: list[str], subject: str) -> str:
    for name in files:
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(subject)
    run(checkout, "add", "-A")
    run(checkout, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", subject)
    return run(checkout, "rev-parse", "HEAD").strip()


def run(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=checkout, check=True, capture_output=True, text=True
    ).stdout


def test_tests_and_generated_files_are_not_counted(tmp_path: Path) -> None:
    run(tmp_path, "init", "-q")
    files = ["backend/a.py", "kernels/b.cu", "tests/backend/test_a.py", "client/options.py"]
    first = commit(tmp_path, files, "models: run A")
    second = commit(tmp_path, ["docs/reference/options.md"], "models: run B")
    found = growth.rows({"family": [first, second]}, tmp_path, {"client/options.py"})
    assert found == [
        ["family", first[:7], "models: run A", "2", "1", "`backend/a.py`, `kernels/b.cu`"],
        ["family", second[:7], "models: run B", "0", "1", "none"],
    ]


def test_an_unknown_kind_of_addition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown key 'familly'; allowed: option, setting"):
        growth.rows({"familly": []}, tmp_path, ())


def test_generated_files_include_those_with_generated_blocks() -> None:
    paths = [*generate.generated(), "backend/inflight/models/families/qwen3.py"]
    assert growth.counted(paths, generate.generated()) == [paths[-1]]


def test_every_kind_of_addition_has_a_place_and_each_row_of_the_page_keeps_its_limit() -> None:
    commits = json.loads((growth.HERE / "growth.json").read_text())
    assert list(commits) == list(growth.LIMITS)
    page = growth.PAGE.read_text().split(growth.BEGIN)[1].split(growth.END)[0]
    lines = [line.split(" | ") for line in page.splitlines()[2:]]
    assert [line[1] for line in lines] == [one[:7] for some in commits.values() for one in some]
    assert all(int(line[3]) <= int(line[4]) for line in lines)
