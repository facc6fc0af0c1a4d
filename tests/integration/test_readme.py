"""What the README tells a newcomer to type works as it stands there, but for the ports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving import Triton

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.integration


def blocks(language: str, containing: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if containing in block]


def on(server: Triton, text: str) -> str:
    return text.replace("localhost:8000", server.http).replace("127.0.0.1:8001", server.grpc)


@pytest.mark.parametrize("client", ["inflight_client", "tritonclient"])
def test_the_python_programs_run(cpu: Triton, client: str):
    (program,) = blocks("python", f"{client}")
    done = subprocess.run(
        [sys.executable, "-c", on(cpu, program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_curl_commands_run(cpu: Triton):
    (block,) = blocks("console", "generate_stream")
    commands = [command.strip() for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(commands) == 3
    answers = []
    for command in commands:
        done = subprocess.run(
            on(cpu, command), shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        lines = done.stdout.replace("data: ", "").split("\n")
        answers.append([json.loads(line)["text_output"] for line in lines if line])
    whole, streamed, chat = answers
    assert len(whole) == len(chat) == 1
    assert len(streamed) > 1
    assert "".join(streamed) == whole[0]
    assert chat[0]
