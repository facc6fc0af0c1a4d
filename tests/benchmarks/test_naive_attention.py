"""The naive kernel of the reading path compiles."""

from __future__ import annotations

from pathlib import Path

from cuda.core import Program, ProgramOptions

import table

SOURCE = Path(table.__file__).parent / "kernels/naive_attention.cu"


def test_the_naive_kernel_compiles_without_a_gpu() -> None:
    program = Program(SOURCE.read_text(), "c++", ProgramOptions(std="c++17", arch="sm_80"))
    found = program.compile("cubin")
    assert bytes(found.code).startswith(b"\x7fELF")
    assert b"naive_attention" in bytes(found.code)
