"""Every kernel compiles, and the cubin cache returns the compiled code."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inflight_kernels import ops
from inflight_kernels.runtime import compile as compiler
from inflight_kernels.runtime.architectures import ARCHITECTURES
from inflight_kernels.runtime.compile import (
    CompileError,
    Cubin,
    Instantiation,
    architectures,
    cubin,
)

SOURCES = sorted(path.stem for path in compiler._CSRC.rglob("*.cu"))

_RECORDS = re.compile(r"grouped::Records<[^>]*>")

# Architectures by what `make test` compiles for them (see `_sampled`).
ALL_SOURCES, WITHOUT_PDL, ONE_OF_EACH = "sm_90a", "sm_80", "sm_120"


def _instantiations() -> list[Instantiation]:
    found: list[Instantiation] = []
    for module in pkgutil.walk_packages(ops.__path__, "inflight_kernels.ops."):
        offers = getattr(importlib.import_module(module.name), "instantiations", None)
        if offers is not None:
            found.extend(offers())
    return found


KERNELS = _instantiations()


def _is_of_models(stem: str, name: str) -> bool:
    """Whether GPUs run models with it: in bfloat16, with logits in float32."""
    if stem.startswith("sampling") or stem == "top_logprobs":
        return "__nv_bfloat16" not in name and "__half" not in name
    return "__half" not in name and "<float" not in name


def _template(stem: str, name: str) -> tuple[str, str, bool, bool]:
    """Stem, template, whether models use it with these types, and whether the first is float32."""
    template, _, types = name.partition("<")
    return stem, template, _is_of_models(stem, name), types.startswith("float")


def _sampled(arch: str) -> list[tuple[str, ...]]:
    """The names of each of KERNELS that `make test` compiles.

    For Hopper: all of models, and the last of each other template, in float16 or float32; of
    weights in records each kind once, and each tile once. For
    Ampere, whose sources lack only Hopper's instructions: the first and the last of each template
    of models. For Blackwell, whose sources lack only wgmma: one of each file, for one architecture.
    """
    groups: dict[tuple[str, str, bool, bool], list[str]] = {}
    for stem, names, _ in KERNELS:
        for name in names:
            groups.setdefault(_template(stem, name), []).append(name)
    wanted: set[tuple[str, str]] = set()
    for (stem, _, of_models, _), names in groups.items():
        if arch == ALL_SOURCES:
            chosen = _each_kind_and_tile(names) if of_models else names[-1:]
        elif arch == WITHOUT_PDL:
            chosen = [names[0], names[-1]] if of_models else []
        elif arch == ONE_OF_EACH and of_models and stem not in {stem for stem, _ in wanted}:
            chosen = names[:1]
        else:
            chosen = []
        wanted.update((stem, name) for name in chosen)
    return [tuple(name for name in names if (stem, name) in wanted) for stem, names, _ in KERNELS]


def _each_kind_and_tile(names: list[str]) -> list[str]:
    """Of a template, those with a kind of records or with other arguments that none before has; all
    without records."""
    chosen, seen = [], set[str]()
    for name in names:
        found = _RECORDS.search(name)
        parts = {found[0], _RECORDS.sub("", name)} if found else {name}
        if parts - seen:
            chosen.append(name)
        seen |= parts
    return chosen


def _cases() -> Iterator[Any]:
    """(instantiation, architecture) of `make test`; of a long run, with all names, and compiled as
    for GPUs."""
    sampled = {arch: _sampled(arch) for arch in ARCHITECTURES.values()}
    for i, (stem, _, defines) in enumerate(KERNELS):
        for arch in architectures(stem):
            some = sampled[arch][i]
            if some:
                yield pytest.param((stem, some, defines), arch, id=f"{stem}-{i}-{arch}")
            yield pytest.param(
                KERNELS[i], arch, id=f"{stem}-{i}-{arch}-all", marks=pytest.mark.long
            )


# ---------------------------------------------------------------- every kernel

Compiled = dict[tuple[Instantiation, str], Future[Cubin]]


def _optimize_little(patched: pytest.MonkeyPatch) -> None:
    """Optimization takes most of a compilation, and errors are found without it. In a cache of its
    own: this code is not for GPUs."""
    quick = functools.partial(compiler.ProgramOptions, ofast_compile="max")
    patched.setattr(compiler, "ProgramOptions", quick)
    patched.setenv("XDG_CACHE_HOME", str(compiler.cache_folder() / "quick"))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """Those of the tests to run, on their way in parallel; NVRTC works without the interpreter's
    lock."""
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == test_every_kernel_compiles_without_a_gpu.__name__
    ]
    wanted = [(item.callspec.params["kernels"], item.callspec.params["arch"]) for item in items]
    with pytest.MonkeyPatch.context() as patched:
        if not any(item.get_closest_marker("long") for item in items):
            _optimize_little(patched)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield {
                (kernels, arch): pool.submit(cubin, *kernels, arch=arch) for kernels, arch in wanted
            }


@pytest.mark.parametrize(("kernels", "arch"), list(_cases()))
def test_every_kernel_compiles_without_a_gpu(
    compiled: Compiled, kernels: Instantiation, arch: str
) -> None:
    found = compiled[kernels, arch].result()
    assert found.code.startswith(b"\x7fELF")
    assert set(found.symbols) == set(kernels[1])
    for symbol in found.symbols.values():
        assert symbol.encode() in found.code


def test_the_sample_has_all_kernels_of_models_and_all_templates() -> None:
    every = {(stem, name) for stem, names, _ in KERNELS for name in names}
    of_models = {(stem, name) for stem, name in every if _is_of_models(stem, name)}
    sampled = {
        arch: {
            (stem, name)
            for (stem, _, _), names in zip(KERNELS, _sampled(arch), strict=True)
            for name in names
        }
        for arch in ARCHITECTURES.values()
    }
    in_records = {(stem, name) for stem, name in of_models if _RECORDS.search(name)}
    assert of_models - in_records < sampled[ALL_SOURCES] <= every
    for part in (lambda name: _RECORDS.findall(name), lambda name: [_RECORDS.sub("", name)]):
        parts, some = (
            {(stem, name.partition("<")[0], *part(name)) for stem, name in found}
            for found in (in_records, sampled[ALL_SOURCES] & in_records)
        )
        assert parts == some, "each kind of records and each tile of every template"
    templates = {_template(stem, name) for stem, name in every}
    assert {_template(stem, name) for stem, name in sampled[ALL_SOURCES]} == templates
    templates = {_template(stem, name) for stem, name in of_models}
    for arch in (ALL_SOURCES, WITHOUT_PDL):
        assert {_template(stem, name) for stem, name in sampled[arch] & of_models} == templates
    assert {stem for stem, _ in sampled[ONE_OF_EACH] & of_models} == set(SOURCES)


def test_every_source_belongs_to_a_module_of_ops() -> None:
    assert SOURCES
    assert {stem for stem, _, _ in KERNELS} == set(SOURCES)


def test_no_kernel_is_named_twice() -> None:
    names = [(stem, name, defines) for stem, names, defines in KERNELS for name in names]
    assert len(names) == len(set(names))


# ---------------------------------------------------------------- the cache


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder and a cache of the test's own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "factor.cuh").write_text('#pragma once\n#include "two.cuh"\n')
    (folder / "two.cuh").write_text("#pragma once\nconstexpr int FACTOR = 2;\n")
    (folder / "other.cuh").write_text("#pragma once\n")
    (folder / "scale.cu").write_text(
        '#include "factor.cuh"\n'
        "#ifndef OFFSET\n#define OFFSET 0\n#endif\n"
        "template <typename T> __global__ void scale(T* x) { *x = *x * FACTOR + OFFSET; }\n"
    )
    monkeypatch.setattr(compiler, "_CSRC", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compilations(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that NVRTC was called for."""
    calls: list[str] = []
    compile_now = compiler._compile

    def counted(
        stem: str,
        source: str,
        names: tuple[str, ...],
        defines: tuple[tuple[str, str], ...],
        arch: str,
    ) -> Cubin:
        calls.append(arch)
        return compile_now(stem, source, names, defines, arch)

    monkeypatch.setattr(compiler, "_compile", counted)
    return calls


def test_the_second_time_comes_from_the_cache(compilations: list[str]) -> None:
    first = cubin("scale", ("scale<float>", "scale<int>"), arch="sm_80")
    second = cubin("scale", ("scale<float>", "scale<int>"), arch="sm_80")
    assert compilations == ["sm_80"]
    assert first == second
    assert set(second.symbols) == {"scale<float>", "scale<int>"}


@pytest.mark.parametrize("change", ["source", "header", "names", "defines", "arch"])
def test_whatever_changes_the_code_compiles_again(
    csrc: Path, compilations: list[str], change: str
) -> None:
    before = cubin("scale", ("scale<float>",), arch="sm_80")
    if change in ("source", "header"):
        path = csrc / ("scale.cu" if change == "source" else "two.cuh")
        path.write_text(
            path.read_text().replace("*x * FACTOR", "*x - FACTOR").replace("= 2", "= 3")
        )
    after = cubin(
        "scale",
        ("scale<float>", "scale<double>") if change == "names" else ("scale<float>",),
        (("OFFSET", "7"),) if change == "defines" else (),
        arch="sm_90a" if change == "arch" else "sm_80",
    )
    assert len(compilations) == 2
    assert after.code != before.code


def test_a_header_of_other_kernels_changes_nothing(csrc: Path, compilations: list[str]) -> None:
    for content in ("// before\n", "// after\n"):
        (csrc / "other.cuh").write_text(content)
        cubin("scale", ("scale<float>",), arch="sm_80")
    assert len(compilations) == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"sha256": "0", "symbols": {}}\ncode', b"[]\nx"])
def test_a_broken_cache_file_is_compiled_again(
    csrc: Path, compilations: list[str], content: bytes
) -> None:
    whole = cubin("scale", ("scale<float>",), arch="sm_80")
    (entry,) = compiler.cache_folder().iterdir()
    entry.write_bytes(content)
    assert cubin("scale", ("scale<float>",), arch="sm_80") == whole
    assert cubin("scale", ("scale<float>",), arch="sm_80") == whole
    assert len(compilations) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    csrc: Path, tmp_path: Path, compilations: list[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert cubin("scale", ("scale<float>",), arch="sm_80").code
    assert cubin("scale", ("scale<float>",), arch="sm_80").code
    assert len(compilations) == 2


def test_nothing_but_whole_entries_is_left_behind(csrc: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cubin("scale", ("scale<float>",), arch="sm_80"), range(8)))
    assert all(entry == found[0] for entry in found)
    (entry,) = compiler.cache_folder().iterdir()
    assert entry.name.startswith("scale-sm_80-")


# ---------------------------------------------------------------- errors


def test_an_error_in_a_source_carries_the_compilers_log(csrc: Path) -> None:
    (csrc / "scale.cu").write_text("__global__ void scale(float* x) { *x = nonsense; }\n")
    with pytest.raises(CompileError) as caught:
        cubin("scale", ("scale",), (("A", "1"),), arch="sm_90a")
    message = str(caught.value)
    assert message.startswith("scale.cu for sm_90a, A=1:")
    assert 'scale.cu(1): error: identifier "nonsense" is undefined' in message


def test_an_unknown_name_is_an_error_and_not_an_empty_cubin(csrc: Path) -> None:
    with pytest.raises(CompileError, match="absent"):
        cubin("scale", ("scale<absent>",), arch="sm_80")


def test_missing_headers_name_the_wheel(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler._toolkit_headers.cache_clear()
    monkeypatch.setattr(compiler, "find_nvidia_header_directory", lambda library: None)
    with pytest.raises(CompileError, match="nvidia-cuda-runtime"):
        cubin("scale", ("scale<float>",), arch="sm_80")


# ---------------------------------------------------------------- ahead of their use


def test_a_precompiled_kernel_is_awaited_and_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[str] = []
    compile_now = compiler._compile

    def counted(stem: str, *rest: Any) -> Cubin:
        compiled.append(stem)
        return compile_now(stem, *rest)

    monkeypatch.setattr(compiler, "_compile", counted)
    kernels = [("batch_state", "write_tables"), ("batch_state", "end_step")]
    compiler.precompile([*kernels, *kernels], arch="sm_80")
    for stem, name in [*kernels, *kernels]:
        assert name in cubin(stem, (name,), arch="sm_80").symbols
    assert compiled == ["batch_state"] * 2


def test_a_precompile_failure_is_raised_where_the_kernel_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.precompile([("cache", "no_such_kernel")], arch="sm_80")
    with pytest.raises(CompileError, match="no_such_kernel"):
        cubin("cache", ("no_such_kernel",), arch="sm_80")


def test_a_compilation_not_started_yet_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # one thread compiles
    may_go_on = threading.Event()
    compile_now = compiler._compile

    def held(stem: str, source: str, names: tuple[str, ...], *rest: Any) -> Cubin:
        if names == ("end_step",):
            assert may_go_on.wait(60)
        return compile_now(stem, source, names, *rest)

    monkeypatch.setattr(compiler, "_compile", held)
    compiler.precompile([("batch_state", "end_step"), ("batch_state", "begin_step")], arch="sm_80")
    assert "begin_step" in cubin("batch_state", ("begin_step",), arch="sm_80").symbols
    may_go_on.set()
    assert "end_step" in cubin("batch_state", ("end_step",), arch="sm_80").symbols
