"""Triton's own load generator, as a command that runs on Debian 12 too.

The 2.60 wheel needs glibc 2.38; pip then installs an empty placeholder without a word. The binary
inside the 2.44 client wheel needs glibc 2.31 and two small libraries, fetched beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = ["tritonclient==2.44.0", "nvidia-cuda-runtime-cu12==12.9.79"]
HOME = Path(sys.prefix, "perf_analyzer")
BINARY = HOME / "tritonclient-2.44.0.data/data/bin/perf_analyzer"
LIBRARIES = [HOME / "nvidia/cuda_runtime/lib", HOME / "usr/lib/x86_64-linux-gnu"]


def find_or_fetch() -> tuple[list[str], dict[str, str]]:
    """The command and the environment to run it in."""
    environment = dict(os.environ)
    installed = shutil.which("perf_analyzer")
    if installed:
        return [installed], environment
    if not BINARY.exists():
        _fetch()
    environment["LD_LIBRARY_PATH"] = ":".join(map(str, LIBRARIES))
    return [str(BINARY)], environment


def run(arguments: str, data: Path, *further: str) -> None:
    """Run it in the folder of its input data; it must succeed without an error in its output."""
    done = execute(arguments, data, *further)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Throughput:" in output, output
    for word in ("failed", "error", "Failed", "Error"):
        assert word not in output, output


def command(arguments: str, data: Path, *further: str) -> tuple[list[str], dict[str, str]]:
    """The command line with these arguments, and its environment."""
    program, environment = find_or_fetch()
    return [*program, *arguments.split(), "--input-data", str(data), *further], environment


def execute(arguments: str, data: Path, *further: str) -> subprocess.CompletedProcess[str]:
    """Run it in the folder of its input data, whatever comes of it; it must end."""
    words, environment = command(arguments, data, *further)
    return subprocess.run(
        words,
        env=environment,
        cwd=data.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _fetch() -> None:
    partial = HOME.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    platforms = ["manylinux1_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64"]
    _run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        + [word for platform in platforms for word in ("--platform", platform)]
        + ["-d", ".", *WHEELS],
        partial,
    )
    for wheel in partial.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith("bin/perf_analyzer") or ".so" in Path(member).name:
                    archive.extract(member, partial)
        wheel.unlink()
    try:
        _run(["apt-get", "download", "libb64-0d"], partial)
    except subprocess.CalledProcessError:  # a fresh image has no package lists yet
        _run(["apt-get", "update"], partial)
        _run(["apt-get", "download", "libb64-0d"], partial)
    _run(["dpkg", "-x", str(next(partial.glob("libb64*.deb"))), "."], partial)
    (partial / BINARY.relative_to(HOME)).chmod(0o755)
    partial.rename(HOME)


def _run(command: list[str], directory: Path) -> None:
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
