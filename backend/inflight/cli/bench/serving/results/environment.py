"""What a report says about where it comes from: commit, machine, versions, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Their values do not belong into a report; the environment can hold them.
_SECRETS = {"--api-key": "INFLIGHT_API_KEY"}
_PACKAGE = "inflight-triton"


def date() -> str:
    """Now, in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command(arguments: Sequence[str]) -> str:
    """The command line that repeats a run, for a shell; keys are named, not shown."""
    words = []
    values = iter(arguments)
    for word in values:
        name, equals, _ = word.partition("=")
        if name in _SECRETS:
            if not equals:
                next(values, None)
            words.append(f'{name} "${_SECRETS[name]}"')
        else:
            words.append(shlex.quote(word))
    return " ".join(["inflight", *words])


def commit() -> str:
    """Of the checkout that runs, or the version of the installed package."""
    # Installed, it may lie in the checkout of another project, which does not track it.
    if _git("ls-files", "--error-unmatch", Path(__file__).name):
        return _git("describe", "--always", "--dirty") or _version()
    return _version()


def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:  # run from the sources, by PYTHONPATH
        return "not installed"


def _git(*arguments: str) -> str:
    """What it prints; "" if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, str]:
    """Of the load generator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "GiB of memory": f"{memory / 2**30:.0f}",
    }


def versions() -> dict[str, str]:
    return {
        "inflight": _version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
