"""OpenMP's threads, which torch computes with on a CPU."""

from __future__ import annotations

import os

# Iterations of some nanoseconds: a fraction of a millisecond, instead of five. Until then an idle
# thread takes a core from the next kernel's threads, or from another process. With none at all,
# torch's products of small matrices wait for threads to wake.
_SPINS = "20000"


def limit_spinning() -> None:
    """Let threads without work sleep soon. Has an effect before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
