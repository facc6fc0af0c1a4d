"""Where a report comes from."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from inflight.cli.bench.serving.results import environment


def test_the_command_repeats_the_run() -> None:
    words = ["bench", "serve", "--rate", "1,2", "--html", "a file.html"]
    text = environment.command(words)
    assert shlex.split(text) == ["inflight", *words]


def test_keys_are_not_shown() -> None:
    for words in (["--api-key", "ifk_secret"], ["--api-key=ifk_secret"]):
        text = environment.command(["bench", "serve", *words, "--rate", "1"])
        assert text == 'inflight bench serve --api-key "$INFLIGHT_API_KEY" --rate 1'


def test_the_origin_has_no_empty_value() -> None:
    assert all(environment.machine().values()) and all(environment.versions().values())
    assert environment.commit()
    assert environment.date().endswith("+00:00")


def test_an_installed_package_has_its_version_whatever_checkout_it_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    git("init", "-q")
    path = tmp_path / "environment.py"
    path.touch()
    monkeypatch.setattr(environment, "__file__", str(path))
    git("commit", "-q", "--allow-empty", "-m", "another project")
    assert environment.commit() == version("inflight-triton")
    git("add", "environment.py")
    git("commit", "-q", "-m", "now it is tracked")
    assert re.fullmatch("[0-9a-f]{7,}", environment.commit())
