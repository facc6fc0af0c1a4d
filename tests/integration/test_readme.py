"""The commands and programs of the README and docs/clients.md work as written, except for ports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serving import Triton

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CLIENTS = ROOT / "docs/clients.md"

pytestmark = pytest.mark.integration


def blocks(page: Path, language: str, containing: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if containing in block]


def on(server: Triton, text: str) -> str:
    return text.replace("localhost:8000", server.http).replace("127.0.0.1:8001", server.grpc)


@pytest.mark.parametrize(
    ("page", "client"),
    [(README, "inflight_client"), (CLIENTS, "inflight_client"), (CLIENTS, "tritonclient")],
    ids=["inflight_client", "asyncio", "tritonclient"],
)
def test_the_python_programs_run(cpu: Triton, page: Path, client: str):
    (program,) = blocks(page, "python", client)
    done = subprocess.run(
        [sys.executable, "-c", on(cpu, program)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_curl_commands_run(cpu: Triton):
    (block,) = blocks(README, "console", "generate_stream")
    commands = [command.strip() for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(commands) == 3
    # Triton 2.51 crashes on a large form, which curl sends by default.
    assert all("-H 'Content-Type: application/json'" in command for command in commands)
    answers = []
    for command in commands:
        done = subprocess.run(
            on(cpu, command), shell=True, capture_output=True, text=True, timeout=120, check=True
        )
        lines = done.stdout.replace("data: ", "").split("\n")
        answers.append([json.loads(line)["text_output"] for line in lines if line])
    whole, streamed, chat = answers
    assert len(whole) == len(chat) == 1
    assert len(streamed) > 1
    assert "".join(streamed) == whole[0]
    assert chat[0]


def test_a_python_that_does_not_fit_is_refused_before_it_is_installed_into(tmp_path: Path):
    for name in ("Makefile", ".ci/find-python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    unfit = tmp_path / "python3.10"
    unfit.write_text('#!/bin/sh\ntest "$1" = -m && mkdir -p .venv\n')
    unfit.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={unfit}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert f"PYTHON={unfit} is not a Python 3.11 or 3.12 with venv and a shared" in done.stderr
    assert not (tmp_path / ".venv").exists()
