"""Compares two runs: differences of medians, with bootstrap intervals.

The interval is the percentile interval of Efron (1979): both samples are drawn again with
replacement, and the 2.5 and 97.5 percentiles of the differences of their medians are its ends.
Requests are drawn, not tokens, since the tokens of a request are not independent. The interval
covers the variation within the two runs; that between runs at other times is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inflight.cli.bench.serving.results.report import Level, Report
from inflight.errors import ConfigError

NUM_RESAMPLES = 2000
_SEED = 0
# Drawn at once, so that large samples do not need gigabytes.
_BATCH = 100
MIN_SAMPLE = 5

# Metric -> the field of RequestTimes. ITL is compared by request: its mean is the TPOT.
_FIELDS = {"ttft ms": "ttft_ms", "tpot ms": "tpot_ms", "longest gap ms": "gap_ms"}
_FIELDS["e2e ms"] = "e2e_ms"
TOKENS = "output tokens in a second"


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one metric at one level of load.

    Attributes:
        load: name of the level.
        before, after: medians.
        low, high: 95 % interval of `after - before`; None if a sample is smaller than MIN_SAMPLE.
    """

    load: str
    metric: str
    before: float
    after: float
    low: float | None
    high: float | None

    @property
    def delta(self) -> float:
        return self.after - self.before

    @property
    def share(self) -> float | None:
        """Of the median before; None if that is 0."""
        return self.delta / self.before if self.before else None

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `same` if the interval has 0, or `unknown` without an interval."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 0 <= self.high:
            return "same"
        is_more_better = self.metric == TOKENS
        return "better" if (self.delta > 0) == is_more_better else "worse"


def compare(before: Report, after: Report) -> list[Difference]:
    """The differences of all levels that both runs have, in the order of the second.

    Raises:
        ConfigError: they have no level in common.
    """
    known = {(level.kind, level.value): level for level in before.levels}
    found = []
    for level in after.levels:
        counterpart = known.get((level.kind, level.value))
        if counterpart is not None:
            found += _of_level(counterpart, level)
    if not found:
        raise ConfigError(
            "--compare: the runs have no level of load in common with completed requests: "
            f"{_names(before)}; {_names(after)}"
        )
    return found


def _names(report: Report) -> str:
    return ", ".join(level.name for level in report.levels) or "none"


def _of_level(before: Level, after: Level) -> list[Difference]:
    found = []
    for metric, field in _FIELDS.items():
        samples = [_values(level, field) for level in (before, after)]
        if all(samples):
            found.append(_difference(after.name, metric, *samples))
    if before.tokens_each_s and after.tokens_each_s:
        found.append(_difference(after.name, TOKENS, before.tokens_each_s, after.tokens_each_s))
    return found


def _values(level: Level, field: str) -> list[float]:
    values = (getattr(one, field) for one in level.requests if not one.error)
    return [value for value in values if value is not None]


def _difference(
    load: str, metric: str, before: Sequence[float], after: Sequence[float]
) -> Difference:
    low, high = None, None
    if min(len(before), len(after)) >= MIN_SAMPLE:
        low, high = interval(before, after)
    medians = [float(np.median(np.asarray(values, float))) for values in (before, after)]
    return Difference(load, metric, medians[0], medians[1], low, high)


def interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the difference of the medians, `after - before`."""
    random = np.random.default_rng(_SEED)
    differences = _medians(after, random) - _medians(before, random)
    low, high = np.percentile(differences, (2.5, 97.5))
    return float(low), float(high)


def _medians(values: Sequence[float], random: np.random.Generator) -> NDArray[np.float64]:
    """Medians of NUM_RESAMPLES samples drawn with replacement."""
    sample = np.asarray(values, float)
    parts = [
        np.median(sample[random.integers(len(sample), size=(_BATCH, len(sample)))], axis=1)
        for _ in range(NUM_RESAMPLES // _BATCH)
    ]
    return np.concatenate(parts)
