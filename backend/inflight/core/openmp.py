"""OpenMP's threads, which torch computes with on a CPU."""

from __future__ import annotations

import os

# Iterations of some nanoseconds: a fraction of a millisecond, not the five by default. Until then an
# idle thread takes a core from those of the next product, of our kernels or of another process. With
# none, torch's products of small matrices wait for threads to wake.
_SPINS = "20000"


def limit_spinning() -> None:
    """Let threads without work sleep soon. Has an effect before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
