"""Snapshots of metrics to test with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from inflight.engine.metrics.families import BY_STEM, FAMILIES
from inflight.engine.metrics.histogram import Histogram
from inflight.engine.metrics.snapshot import Metrics, flat


def empty(engine: int = 1) -> Metrics:
    """Of an engine that has done nothing; its gauges are 0, too."""
    return _flat(engine, {})


def with_values(metrics: Metrics, **changed: float | Mapping[str, float]) -> Metrics:
    """With other counters and gauges, by stem; those of a family with a label by its value."""
    values = {}
    for stem, value in changed.items():
        family = BY_STEM[stem]
        by_label = value if isinstance(value, Mapping) else {"": value}
        for label, one in by_label.items():
            index = family.values.index((label,) if label else ())
            values[stem, index] = one
    fresh = _flat(metrics.engine, values)
    merged = [new if new else old for new, old in zip(fresh.values, metrics.values, strict=True)]
    return Metrics(metrics.engine, merged, metrics.counts, metrics.sums)


def observed(metrics: Metrics, stem: str, values: Iterable[float], *labels: str) -> Metrics:
    """With observations of a histogram."""
    family = BY_STEM[stem]
    histogram = Histogram(family.bounds)
    for value in values:
        histogram.observe(value)
    added = _flat(metrics.engine, {}, {(stem, family.values.index(labels)): histogram})
    counts = [sum(pair) for pair in zip(metrics.counts, added.counts, strict=True)]
    sums = [sum(pair) for pair in zip(metrics.sums, added.sums, strict=True)]
    return Metrics(metrics.engine, metrics.values, counts, sums)


def _flat(
    engine: int,
    values: Mapping[tuple[str, int], float],
    histograms: Mapping[tuple[str, int], Histogram] | None = None,
) -> Metrics:
    scalars: dict[str, list[float]] = {}
    buckets: dict[str, list[tuple[list[int], float]]] = {}
    for family in FAMILIES:
        if family.kind != "histogram":
            found = [values.get((family.stem, index), 0.0) for index in range(len(family.values))]
            scalars[family.stem] = found
            continue
        own = [
            (histograms or {}).get((family.stem, index), Histogram(family.bounds))
            for index in range(len(family.values))
        ]
        buckets[family.stem] = [(one.counts, one.sum) for one in own]
    return flat(engine, scalars, buckets)
