"""Service level objectives: bounds that a request has to meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inflight.cli.bench.serving.results.records import GIVEN_UP, RequestTimes
from inflight.errors import ConfigError, did_you_mean

# Bound -> field of RequestTimes. The mean ITL of a request is its TPOT.
_FIELDS = {"ttft": "ttft_ms", "itl": "tpot_ms", "tpot": "tpot_ms", "gap": "gap_ms", "e2e": "e2e_ms"}


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds, by name; a request meets all or fails."""

    bounds: tuple[tuple[str, float], ...]

    def is_met(self, times: RequestTimes) -> bool:
        """Whether a request completed within all bounds. An output of one response has no ITL and
        meets bounds on it."""
        if times.error:
            return False
        found = ((getattr(times, _FIELDS[name]), bound) for name, bound in self.bounds)
        return all(value is None or value <= bound for value, bound in found)

    def is_met_at_p99(self, times: Sequence[RequestTimes]) -> bool:
        """Whether the 99th percentile of each bounded latency is within its bound, as MLPerf's
        server scenarios have it, and no request failed but those that were given up: their
        latencies count."""
        if not times or any(one.error not in ("", GIVEN_UP) for one in times):
            return False
        for name, bound in self.bounds:
            found = (getattr(one, _FIELDS[name]) for one in times)
            values = [value for value in found if value is not None]
            if values and np.percentile(values, 99) > bound:
                return False
        return True

    def patience_s(self, num_tokens: int) -> float:
        """Seconds after which a request of so many output tokens has missed a bound if it has not
        ended; infinite if no bound implies one."""
        bounds = dict(self.bounds)
        per_token = min(bounds.get("tpot", math.inf), bounds.get("itl", math.inf))
        after_first = per_token * (num_tokens - 1) if num_tokens > 1 else 0.0
        whole = bounds.get("ttft", math.inf) + after_first
        return min(bounds.get("e2e", math.inf), whole) / 1e3

    def __str__(self) -> str:
        return ",".join(f"{name}={bound:g}" for name, bound in self.bounds)


def parse(text: str) -> Slo:
    """`ttft=500,itl=50`: milliseconds.

    Raises:
        ConfigError: an unknown name, or not a positive number.
    """
    bounds = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _FIELDS:
            raise ConfigError(
                f"--slo: {name!r} is unknown; allowed: {', '.join(_FIELDS)}, such as "
                f"ttft=500,itl=50{did_you_mean(name, _FIELDS)}"
            )
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = math.nan
        if not 0 < bounds[name] < math.inf:
            raise ConfigError(f"--slo: {name} is {value!r}; allowed: milliseconds, above 0")
    return Slo(tuple(bounds.items()))
