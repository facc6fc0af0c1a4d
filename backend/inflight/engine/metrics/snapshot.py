"""Snapshots of an engine's metrics: flat arrays in the order of the table of families."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from inflight.engine.metrics.families import (
    BY_STEM,
    FAMILIES,
    LABELS,
    TRTLLM_LABELS,
    Alias,
    Family,
    Kind,
)

Labels = dict[str, str]


def _offsets(sizes: Iterable[tuple[str, int]]) -> tuple[dict[str, int], int]:
    """Where each stem's items begin in a flat array, and its length."""
    found, end = {}, 0
    for stem, size in sizes:
        found[stem] = end
        end += size
    return found, end


_SCALARS = [one for one in FAMILIES if one.kind != "histogram" and not one.facts]
_HISTOGRAMS = [one for one in FAMILIES if one.kind == "histogram"]
_VALUE_AT, _NUM_VALUES = _offsets((one.stem, len(one.values)) for one in _SCALARS)
_SUM_AT, _NUM_SUMS = _offsets((one.stem, len(one.values)) for one in _HISTOGRAMS)
_COUNT_AT, _NUM_COUNTS = _offsets(
    (one.stem, len(one.values) * (len(one.bounds) + 1)) for one in _HISTOGRAMS
)
_IS_COUNTER = [one.kind == "counter" for one in _SCALARS for _ in one.values]
# Gauges of an engine that is not running.
_ACTIVITY = ("num_requests_running", "num_requests_waiting", "num_requests_suspended")
_QUEUED = ("num_requests_queued", "num_prompt_tokens_queued")
_IDLE = (
    *(*_ACTIVITY, *_QUEUED, "num_requests_active"),
    *("kv_cache_usage_perc", "saturation", "engine_up"),
)


class Metrics(msgspec.Struct, tag="metrics", frozen=True):
    """A snapshot, taken between two steps.

    Attributes:
        engine: identifies the engine; its counters count from its start.
        values: of counters and gauges, by family, then by label.
        counts: of the histograms' buckets, not cumulative, by family, then by label.
        sums: of the values that each histogram has observed.
    """

    engine: int
    values: list[float]
    counts: list[int]
    sums: list[float]

    def __post_init__(self) -> None:
        """Raises ValueError for the arrays of another table."""
        found = len(self.values), len(self.counts), len(self.sums)
        if found != (_NUM_VALUES, _NUM_COUNTS, _NUM_SUMS):
            raise ValueError("metrics of another version of inflight")

    def value(self, stem: str, *values: str) -> float:
        """A counter or gauge, by the values of the family's own labels."""
        return self.values[_VALUE_AT[stem] + BY_STEM[stem].values.index(values)]

    def histogram(self, stem: str, *values: str) -> tuple[list[int], float]:
        """A histogram's counts and its sum."""
        family = BY_STEM[stem]
        index, size = family.values.index(values), len(family.bounds) + 1
        begin = _COUNT_AT[stem] + index * size
        return self.counts[begin : begin + size], self.sums[_SUM_AT[stem] + index]


def flat(
    engine: int,
    values: dict[str, list[float]],
    histograms: dict[str, list[tuple[list[int], float]]],
) -> Metrics:
    """A snapshot of values and of (counts, sum) by stem, in the order of each family's values."""
    found = [pair for one in _HISTOGRAMS for pair in histograms[one.stem]]
    return Metrics(
        engine,
        [float(value) for one in _SCALARS for value in values[one.stem]],
        [count for counts, _ in found for count in counts],
        [total for _, total in found],
    )


class Totals:
    """Adds up the counters of the engines that run one after another."""

    def __init__(self) -> None:
        self._base: Metrics | None = None  # sums over the engines that have ended
        self._last: Metrics | None = None

    def add(self, snapshot: Metrics) -> Metrics:
        """The snapshot with the counts of all earlier engines; its gauges are the engine's own."""
        if self._last is not None and self._last.engine != snapshot.engine:
            self._base = self._with_base(self._last)
            self._base.values[_VALUE_AT["engine_restarts"]] += 1
        self._last = snapshot
        return self._with_base(snapshot)

    def without_engine(self) -> Metrics | None:
        """The counts until now, with the gauges of an engine that is not running; None before the
        first engine."""
        if self._last is None:
            return None
        found = self._with_base(self._last)
        for stem in _IDLE:
            at, size = _VALUE_AT[stem], len(BY_STEM[stem].values)
            found.values[at : at + size] = [0.0] * size
        blocks = _VALUE_AT["kv_cache_blocks"]
        found.values[blocks : blocks + 2] = [found.value("kv_cache_max_blocks"), 0.0]
        return found

    def _with_base(self, snapshot: Metrics) -> Metrics:
        """A new snapshot with the counters of the base added."""
        base = self._base
        if base is None:
            return Metrics(
                snapshot.engine,
                snapshot.values.copy(),
                snapshot.counts.copy(),
                snapshot.sums.copy(),
            )
        values = [
            value + before if is_counter else value
            for value, before, is_counter in zip(
                snapshot.values, base.values, _IS_COUNTER, strict=True
            )
        ]
        counts = [sum(pair) for pair in zip(snapshot.counts, base.counts, strict=True)]
        sums = [sum(pair) for pair in zip(snapshot.sums, base.sums, strict=True)]
        return Metrics(snapshot.engine, values, counts, sums)


class Sample(NamedTuple):
    """A value as published. suffix: of a histogram's series; "" otherwise."""

    suffix: str
    labels: Labels
    value: float


class Published(NamedTuple):
    """The samples of one name, of one model."""

    name: str
    kind: Kind
    meaning: str
    samples: list[Sample]


def publish(metrics: Metrics, labels: Labels, flavours: frozenset[str]) -> Iterator[Published]:
    """A model's metrics as they are published.

    Args:
        metrics: of the model's engine.
        labels: values of LABELS.
        flavours: whose aliases are published, too. A name may come several times.
    """
    own = {name: labels[name] for name in LABELS}
    for family in FAMILIES:
        samples = list(_samples(metrics, family, family.values))
        yield _published(family, family.name, family.kind, own, samples)
        for alias in family.aliases:
            if alias.flavour in flavours:
                yield _aliased(metrics, family, alias, labels)


def _aliased(metrics: Metrics, family: Family, alias: Alias, labels: Labels) -> Published:
    if alias.flavour == "vllm":
        samples = _samples(metrics, family, family.values)
        own = {name: labels[name] for name in LABELS}
        return _published(family, alias.name, family.kind, own, samples)
    # TensorRT-LLM's names split what is one family there into several families here.
    values = family.values if alias.of is None else (alias.of,)
    kind: Kind = "gauge" if family.kind == "counter" else family.kind
    constant = {name: labels[name] for name in TRTLLM_LABELS} | dict(alias.labels)
    samples = (
        Sample(one.suffix, {"le": one.labels["le"]} if "le" in one.labels else {}, one.value)
        for one in _samples(metrics, family, values)
    )
    return _published(family, alias.name, kind, constant, samples)


def _published(
    family: Family, name: str, kind: Kind, labels: Labels, samples: Iterable[Sample]
) -> Published:
    labelled = [Sample(one.suffix, labels | one.labels, one.value) for one in samples]
    return Published(name, kind, family.meaning, labelled)


def _samples(
    metrics: Metrics, family: Family, wanted: Iterable[tuple[str, ...]]
) -> Iterator[Sample]:
    """The samples of a family, with its own labels only."""
    if family.facts:
        facts = {label: f"{metrics.value(stem):.0f}" for label, stem in family.facts}
        yield Sample("", facts, 1.0)
        return
    for values in wanted:
        labels = dict(zip(family.labels, values, strict=True))
        if family.kind != "histogram":
            yield Sample("", labels, metrics.value(family.stem, *values))
            continue
        counts, total = metrics.histogram(family.stem, *values)
        bounds = (*family.bounds, math.inf)
        for bound, count in zip(bounds, itertools.accumulate(counts), strict=True):
            yield Sample("_bucket", labels | {"le": _le(bound)}, float(count))
        yield Sample("_sum", labels, total)
        yield Sample("_count", labels, float(sum(counts)))


def _le(bound: float) -> str:
    """As Prometheus's clients write it."""
    return "+Inf" if bound == math.inf else repr(float(bound))
