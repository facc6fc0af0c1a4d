"""The scripts in examples/ run against a server and print the documented output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving import Triton

EXAMPLES = Path(__file__).parents[2] / "examples"

# What the small model's greedy output makes each of them print.
PRINTED = {
    "stream_completion.py": r"Paris.*\n\[(length|stop)\]\n\Z",
    "async_completions.py": r"\A(?=.*'The capital of France is': ' Paris)('.+, \d tokens\n){3}\Z",
    "chat.py": r"\A> What is .*France\?\n.*Paris.*\n> Which river flows through it\?\n.+",
    "structured_output.py": r"\A.{0,20} is (small|medium|large)\n\Z",
    "logprobs.py": r"\A(\S.+ -?\d+\.\d\d \(rank 1\); others: .+ -\d+\.\d\d.*\n){4}\Z",
}

pytestmark = pytest.mark.integration


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises(cpu: Triton, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--url", cpu.grpc],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout, re.DOTALL), done.stdout
    cpu.wait_until_idle()
