"""Triton's error for a request that does not fit into the shared memory of a model's process."""

from __future__ import annotations

import re

FULL = (
    "the server has too little free shared memory for the request; retry later, or send a shorter "
    "request"
)
"""What a client gets instead: Triton's text names the region."""

_OF_TRITON = re.compile(r"shared memory pool|No space left on device")


def is_full(text: str) -> bool:
    """Whether an error text of Triton says so."""
    return _OF_TRITON.search(text) is not None
