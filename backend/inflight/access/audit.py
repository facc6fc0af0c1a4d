"""The audit log: who changed keys, and which requests were refused; JSON lines without prompts and
without keys."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from inflight.deploy.log_files import cap_log, state_folder

# Lines per second; a client that guesses keys must not fill the disk or hide other lines.
MAX_LINES_PER_S = 100
MAX_BYTES = 64 << 20
MAX_VALUE = 256

logger = logging.getLogger(__name__)


def default_path() -> Path:
    return state_folder() / "audit.jsonl"


class AuditLog:
    """Appends events to a file of mode 0600 and of bounded size.

    Args:
        path: of the file; the part before the last one is kept as PATH.1.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._second = 0
        self._num_lines = 0
        self._has_failed = False

    def write(self, event: str, **fields: str | int) -> None:
        """Append an event; a full disk does not stop the server.

        Args:
            event: its name.
            fields: cut to MAX_VALUE characters; control characters are escaped.
        """
        now = self._clock()
        if int(now) != self._second:
            suppressed = self._num_lines - MAX_LINES_PER_S
            self._second, self._num_lines = int(now), 0
            if suppressed > 0:
                self._append({"time": round(now, 3), "event": "suppressed", "count": suppressed})
        self._num_lines += 1
        if self._num_lines <= MAX_LINES_PER_S:
            self._append({"time": round(now, 3), "event": event, **fields})

    def _append(self, record: dict[str, str | int | float]) -> None:
        cut = {k: v[:MAX_VALUE] if isinstance(v, str) else v for k, v in record.items()}
        # ASCII: what a terminal takes for a command is escaped, DEL included.
        line = json.dumps(cut).replace("\x7f", "\\u007f") + "\n"
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, line.encode("ascii"))
            finally:
                os.close(descriptor)
            cap_log(self._path, MAX_BYTES)
            with contextlib.suppress(FileNotFoundError):
                self._path.with_name(self._path.name + ".1").chmod(0o600)
        except OSError as error:
            if not self._has_failed:
                logger.error("the audit log cannot be written: %s", error.strerror)
            self._has_failed = True
        else:
            self._has_failed = False
