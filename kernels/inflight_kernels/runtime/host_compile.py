"""Compiles the C in csrc/cpu/ for this machine's CPU, with its C compiler, and loads it.

A cache entry's name is a hash of the source, the options, the compiler's version and the CPU, so
entries are never stale. Several processes may write one at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from inflight_kernels.runtime.cache_folder import cache_folder

_CSRC = Path(__file__).parents[1] / "csrc" / "cpu"
# Of this machine's CPU alone. Sums keep their order, fused with products where a source says so.
_OPTIONS = (
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off"),
    *("-fPIC", "-shared", "-pthread"),
)
_TIMEOUT_S = 120.0


class HostCompileError(RuntimeError):
    """There is no C compiler, or it rejected a source; the message says what to do."""


@functools.cache
def library() -> ctypes.CDLL:
    """The functions of all sources, compiled when they are first used on this machine.

    If the cache cannot be written, each process compiles for itself.

    Raises:
        HostCompileError: no compiler, one that rejects a source, or no space for the library.
    """
    command = shlex.split(os.environ.get("CC", "cc"))
    path = cache_folder() / f"cpu-{_key(command)}.so"
    try:
        if not path.is_file() and not _is_cached(command, path):
            with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
                _compile(command, Path(folder) / path.name)
                return ctypes.CDLL(str(Path(folder) / path.name))
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise HostCompileError(f"{path}: {error}") from None


def _is_cached(command: list[str], path: Path) -> bool:
    """Compile into the cache, unless it cannot be written."""
    try:
        _compile(command, path)
    except OSError:
        return False
    return True


def _key(command: list[str]) -> str:
    sources = {path.name: path.read_text() for path in sorted(_CSRC.glob("*.[ch]"))}
    parts = (sources, _OPTIONS, command, _version(command), _cpu())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _version(command: list[str]) -> str:
    return _run([*command, "--version"])


def _cpu() -> list[str]:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    kept = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(kept)})


def _compile(command: list[str], path: Path) -> None:
    sources = [str(source) for source in sorted(_CSRC.glob("*.c"))]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        _run([*command, *_OPTIONS, *sources, "-lm", "-o", str(partial)])
        os.replace(partial, path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostCompileError(
            f"{command[0]} cannot be run ({error}); install a C compiler, such as gcc, or name one "
            "in the environment variable CC"
        ) from None
    if done.returncode:
        raise HostCompileError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout
