"""Health files that stay valid: a pause of the test is no hung supervisor."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from inflight.ipc.health import Health

_FOR_S = 3600.0


def write(path: Path, health: Health) -> None:
    """Replace the file at once, as the supervisor does, with a time in the future."""
    stamped = msgspec.structs.replace(health, written_at=time.monotonic() + _FOR_S)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(stamped))
    new.replace(path)
