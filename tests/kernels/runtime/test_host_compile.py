"""The library in C is compiled once for a CPU; where it cannot be, the error says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight_kernels.runtime import host_compile
from inflight_kernels.runtime.host_compile import HostCompileError, library

# Products of all kinds and attention, whose results are printed as a digest.
PRODUCTS = """
import hashlib
import numpy
import torch
from inflight_kernels.cpu_ops import transformer
from inflight_kernels.cpu_ops.grouped_linear import PackedMatrix
from inflight_kernels.torch_ops.transformer import AttentionPlan

random = torch.Generator().manual_seed(0)
digest = hashlib.sha256()
for bits, group in ((4, 16), (4, 32), (4, 64), (4, 24), (8, 16), (8, 32), (8, 24)):
    codes = torch.randint(1 << bits, (70, 192), generator=random, dtype=torch.uint8)
    scales, minimums = torch.randn(2, 70, 192 // group, generator=random)
    for levels in (None, torch.randn(16, generator=random)) if bits == 4 else (None,):
        matrix = PackedMatrix(codes, bits, scales, minimums, 3.0, levels)
        for rows in (1, 2, 5, 100):
            x, out = torch.randn(rows, 192, generator=random), torch.empty(rows, 70)
            x[:, 40:50] *= 30.0  # rounded to 16 bits
            matrix.product(x, None, out)
            digest.update(out.numpy().tobytes())
k, v = torch.randn(2, 8, 16, 2, 24, generator=random)
plan = AttentionPlan(numpy.arange(8)[None], numpy.array([0, 9]), numpy.array([100]), 16)
q = torch.randn(9, 4, 24, generator=random)
digest.update(transformer.attend(q, k, v, plan, 0.2, each=True).numpy().tobytes())
print(digest.hexdigest())
"""

# In a process of its own.
COMPILE = [sys.executable, "-c", f"from {host_compile.__name__} import library; library()"]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, no library loaded from another one, and quick compilations here."""
    quick = tuple(option.replace("-O3", "-O0") for option in host_compile._OPTIONS)
    monkeypatch.setattr(host_compile, "_OPTIONS", quick)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield tmp_path / "inflight" / "kernels"
    library.cache_clear()


def script(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library().grouped_linear  # noqa: B018
    (entry,) = fresh.iterdir()
    before = entry.stat().st_mtime_ns
    library.cache_clear()
    monkeypatch.setattr(host_compile, "_compile", pytest.fail)
    library()
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [before]


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    library().grouped_linear  # noqa: B018


def test_sources_have_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*host_compile._OPTIONS, "-Wall", "-Wextra", "-Werror")
    monkeypatch.setattr(host_compile, "_OPTIONS", options)
    library()


@pytest.mark.long
def test_processes_may_compile_at_once(fresh: Path) -> None:
    running = [subprocess.Popen(COMPILE, env=os.environ) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list(fresh.iterdir())) == 1, "neither partial files nor further entries"


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -O1")
    with pytest.raises(HostCompileError, match=r"/nowhere/cc .*install a C compiler, such as gcc"):
        library()


def test_a_compilers_messages_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'test "$1" = --version && echo 1.0 && exit; echo "no such option" >&2; exit 1'
    monkeypatch.setenv("CC", script(tmp_path, text))
    with pytest.raises(HostCompileError, match=r"(?s)compiler .*failed:\nno such option"):
        library()


def test_another_compiler_makes_another_library(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library()
    library.cache_clear()
    monkeypatch.setenv("CC", script(tmp_path, 'exec cc "$@"'))
    library()
    assert len(list(fresh.iterdir())) == 2


def test_a_damaged_entry_is_reported(fresh: Path) -> None:
    """In other processes: this one would keep the library that it has loaded."""
    subprocess.run(COMPILE, env=os.environ, check=True)
    (entry,) = fresh.iterdir()
    entry.write_bytes(b"no library")
    done = subprocess.run(COMPILE, env=os.environ, capture_output=True, text=True)
    assert f"HostCompileError: {entry}" in done.stderr


def test_results_have_the_same_bits_with_all_instruction_sets() -> None:
    """Integers are exact, and floats are summed in one order, in vectors of any width. Flags that
    this CPU does not need change nothing."""
    flags = ("", "-mno-avx512f")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PRODUCTS],
            env=os.environ | {"CC": f"cc -O0 {flag}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for flag in flags
    ]
    digests = [process.communicate(timeout=240)[0] for process in running]
    assert len(digests[0]) > 60
    assert set(digests) == {digests[0]}


@pytest.mark.long
def test_a_cpu_without_these_vectors_computes_the_same() -> None:
    """The tests of the kernels, in code for another CPU."""
    folder = Path(__file__).parents[1] / "cpu_ops"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    command += ["-k", "any_shape or alone_and_in or single_rows or norm or exponentials"]
    environment = os.environ | {"CC": "cc -mno-fma -mno-avx2 -mno-f16c"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
