"""When requests of an open loop are sent."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Arrival times of a Poisson process, in seconds from its start, without end.

    Args:
        rate: mean requests per second, above 0.
        seed: the same one gives the same times.
    """
    source = random.Random(seed)
    at = 0.0
    while True:
        at += source.expovariate(rate)
        yield at
