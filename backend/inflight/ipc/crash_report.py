"""What a crashing engine leaves behind: a file that has text if it crashed, and no text if it was
stopped or killed.

An engine killed by SIGKILL cannot write, and one that stops in order does not. A fatal signal of
its own code (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) writes the stack of each thread: the handler
is in C and needs neither memory nor the interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import traceback
from pathlib import Path


class CrashReport:
    """The report of this process.

    Args:
        path: of the file; replaced.

    Attributes:
        former: the report of the process before; empty if it did not crash.
    """

    def __init__(self, path: Path) -> None:
        self.former = ""
        with contextlib.suppress(OSError):
            self.former = path.read_text(errors="replace")
        self._file = open(path, "w")  # stays open: the handler writes to it  # noqa: SIM115
        faulthandler.enable(self._file)

    def log(self, logger: logging.Logger) -> None:
        """Log the former report; a record is one line."""
        for number, line in enumerate(self.former.splitlines()):
            logger.error("the engine before this one %s: %s", "at" if number else "crashed", line)

    def write(self, error: BaseException) -> None:
        """The process is about to exit because of an error."""
        traceback.print_exception(error, file=self._file)
        self._file.flush()
