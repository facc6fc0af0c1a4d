"""A wall clock that jumps for all Python processes that a test starts (see shifted_clock.c)."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class ShiftedClock:
    """Used by processes that start from now on.

    Args:
        folder: for the library and the shift.

    Raises:
        FileNotFoundError: there is no C compiler.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError("cc")
        library = folder / "shifted_clock.so"
        command = [compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        self._file = folder / "shift"
        self._file.write_bytes(bytes(8))
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("CLOCK_SHIFT", str(self._file))

    def jump(self, seconds: int) -> None:
        """To so many seconds from the real time, at once."""
        with open(self._file, "r+b") as file:
            file.write(struct.pack("=q", seconds))
