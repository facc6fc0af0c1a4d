"""Compiles the CUDA C++ in csrc/ to cubins with NVRTC; needs no toolkit, GPU or driver.

A cache entry's name is a hash of the source, the headers that it includes, the options and the
compiler version, so entries are never stale. Several processes may write one at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions
from cuda.pathfinder import find_nvidia_header_directory

from inflight_kernels.runtime.architectures import ARCHITECTURES
from inflight_kernels.runtime.cache_folder import cache_folder

Instantiation = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]
"""Kernels of a module of ops: stem, names and defines of `cubin`."""

_CSRC = Path(__file__).parents[1] / "csrc"

# Compilations started by `precompile` and not requested yet.
_pending: dict[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...], str], Future[Cubin]] = {}

# Incremented when the format of a cache file or the compilation changes.
_FORMAT = 1


class CompileError(RuntimeError):
    """NVRTC rejected a source or a name expression; the message is its log."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for one architecture.

    Attributes:
        code: an ELF image.
        symbols: the symbol of each name expression, e.g. `silu_mul<float>` -> `_Z8silu_mul...`.
    """

    code: bytes
    symbols: dict[str, str]


def architectures(stem: str) -> tuple[str, ...]:
    """Architectures of <stem>.cu: sources named *_hopper.cu are for Hopper only."""
    return ("sm_90a",) if stem.endswith("_hopper") else tuple(ARCHITECTURES.values())


def source_of(stem: str) -> Path:
    """The path of <stem>.cu in any folder of csrc/.

    Raises:
        CompileError: there is no such file.
    """
    found = next(_CSRC.rglob(f"{stem}.cu"), None)
    if found is None:
        raise CompileError(f"csrc/ has no {stem}.cu")
    return found


def cubin(
    stem: str,
    names: Sequence[str],
    defines: Sequence[tuple[str, str]] = (),
    *,
    arch: str,
) -> Cubin:
    """Compile <stem>.cu, or read the cubin from the cache.

    Args:
        stem: of the source file.
        names: name expressions to instantiate, such as `silu_mul<__nv_bfloat16>`.
        defines: macros, as (name, value).
        arch: a real architecture such as `sm_90a`.

    Raises:
        CompileError: with the compiler's log.
    """
    names, defines = tuple(names), tuple(defines)
    coming = _pending.pop((stem, names, defines, arch), None)
    if coming is None or coming.cancel():  # not started: no need to wait for those queued before it
        return _find(stem, names, defines, arch)
    return coming.result()


def _find(
    stem: str, names: tuple[str, ...], defines: tuple[tuple[str, str], ...], arch: str
) -> Cubin:
    source = source_of(stem).read_text()
    path = cache_folder() / f"{stem}-{arch}-{_key(source, names, defines, arch)}.cubin"
    found = _read(path)
    if found is None:
        found = _compile(stem, source, names, defines, arch)
        # If the cache cannot be written, each start compiles again.
        with contextlib.suppress(OSError):
            _write(path, found)
    return found


def precompile(kernels: Iterable[tuple[str, str]], *, arch: str) -> None:
    """Start to compile kernels in the background, on as many threads as there are cores; NVRTC
    releases the GIL.

    Args:
        kernels: (stem, name) of each, in the order in which they are started: longest first.
        arch: see `cubin`.
    """
    wanted = [(stem, (name,), (), arch) for stem, name in dict.fromkeys(kernels)]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile")
    for key in wanted:
        if key not in _pending:
            stem, names, defines, _ = key
            _pending[key] = pool.submit(_find, stem, names, defines, arch)
    pool.shutdown(wait=False)


def _compile(
    stem: str,
    source: str,
    names: tuple[str, ...],
    defines: tuple[tuple[str, str], ...],
    arch: str,
) -> Cubin:
    options = ProgramOptions(
        name=f"{stem}.cu",
        arch=arch,
        std="c++17",
        include_path=[str(_CSRC), *_toolkit_headers()],
        define_macro=list(defines) or None,
    )
    try:
        code = Program(source, "c++", options).compile("cubin", name_expressions=names)
    except Exception as error:  # cuda.core's exceptions have no common public base
        macros = "".join(f", {name}={value}" for name, value in defines)
        raise CompileError(f"{stem}.cu for {arch}{macros}:\n{error}") from error
    symbols = {name: symbol.decode() for name, symbol in code.symbol_mapping.items()}
    return Cubin(bytes(code.code), symbols)


def _key(
    source: str, names: tuple[str, ...], defines: tuple[tuple[str, str], ...], arch: str
) -> str:
    headers: dict[str, str] = {}
    _collect_headers(source, headers)
    parts = (_FORMAT, source, sorted(headers.items()), names, defines, arch, _toolkit())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def _collect_headers(source: str, found: dict[str, str]) -> None:
    """Add the texts of the headers in csrc/ that a source includes, directly or not, to found."""
    for name in _INCLUDE.findall(source):
        path = _CSRC / name
        if name not in found and path.is_file():
            found[name] = path.read_text()
            _collect_headers(found[name], found)


@functools.cache
def _toolkit() -> tuple[int, ...]:
    """NVRTC's version."""
    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


@functools.cache
def _toolkit_headers() -> tuple[str, ...]:
    """Folders of cuda_bf16.h and of libcu++: from wheels, conda or an installed toolkit."""
    found = []
    for library, wheel in (("cudart", "nvidia-cuda-runtime"), ("cccl", "nvidia-cuda-cccl")):
        folder = find_nvidia_header_directory(library)
        if folder is None:
            raise CompileError(
                f"no CUDA headers ({library}) found; install {wheel} (in the repository: "
                "pip install -e '.[cuda]') or set CUDA_HOME to a toolkit"
            )
        found.append(folder)
    return tuple(found)


# ---------------------------------------------------------------- the cache on disk


def _read(path: Path) -> Cubin | None:
    """Read a header line in JSON, then the code. None if missing or corrupt."""
    try:
        header, _, code = path.read_bytes().partition(b"\n")
        fields = json.loads(header)
    except (OSError, ValueError):
        return None
    if not isinstance(fields, dict) or fields.get("sha256") != hashlib.sha256(code).hexdigest():
        return None
    return Cubin(code, fields["symbols"])


def _write(path: Path, entry: Cubin) -> None:
    header = {"sha256": hashlib.sha256(entry.code).hexdigest(), "symbols": entry.symbols}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(json.dumps(header).encode() + b"\n" + entry.code)
            file.close()
            os.replace(file.name, path)
        except BaseException:  # re-raised; leaves no partial file behind
            os.unlink(file.name)
            raise
