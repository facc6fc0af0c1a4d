"""Core dumps, which would hold the prompts and outputs of all clients."""

from __future__ import annotations

import resource


def forbid_core_dumps() -> None:
    """Forbid them for this process and all that it starts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
