"""The charts of a report and of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inflight.cli.bench.serving.page import scale
from inflight.cli.bench.serving.page.chart import Chart, Point, Series
from inflight.cli.bench.serving.results.report import Level

_LATENCIES = {
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "e2e": "Time to the last token",
}
_PERCENTILES = ("p50", "p90", "p99")
_STEADY_PERCENTILES = ("p50", "p95", "p99")
_TPOT = "tpot"
_TITLES = {**_LATENCIES, _TPOT: "Time per output token of a request"}
_LOAD_LABELS = {"concurrency": "requests in flight", "rate": "requests per second"}


def of_run(levels: Sequence[Level], bounds: Mapping[str, float] | None = None) -> list[Chart]:
    """Latency over load, throughput over latency, distributions; none without a result. Of open
    loops in a steady state: latencies and goodput over the rate.

    Args:
        bounds: the SLO, in milliseconds by latency.
    """
    if levels and all(level.ramp_s for level in levels):
        return _of_rates(sorted(levels, key=lambda level: level.value), bounds or {})
    return [
        *(chart for name in ("ttft", "itl") for chart in _over_load(levels, name)),
        *(chart for name in ("itl", "ttft") for chart in _throughput(levels, name)),
        *(chart for name in _LATENCIES for chart in _distribution(_by_level(levels, name), name)),
    ]


def _of_rates(levels: Sequence[Level], bounds: Mapping[str, float]) -> list[Chart]:
    names = ("ttft", _TPOT, "itl", "e2e")
    return [
        *(
            chart
            for name in names
            for chart in _over_load(levels, name, _STEADY_PERCENTILES, bounds.get(name))
        ),
        *_goodput(levels),
        *_output(levels),
    ]


def _goodput(levels: Sequence[Level]) -> list[Chart]:
    """Requests per second that meet the SLO, beside those that arrive."""
    found = [(level, level.goodput_per_s) for level in levels if level.goodput_per_s is not None]
    if not found:
        return []
    good = [Point(level.value, value, f"{level.name}: {value:,.2f}/s") for level, value in found]
    all_ = [Point(level.value, level.value) for level, _ in found]
    return [
        Chart(
            "Goodput over load",
            _load_label(levels),
            "requests/s within the SLO",
            scale.levels([point.x for point in good]),
            scale.linear(point.y for point in (*good, *all_)),
            [Series("goodput", good), Series("all", all_)],
        )
    ]


def _output(levels: Sequence[Level]) -> list[Chart]:
    rates = [(level, level.throughput.output_tokens_per_s) for level in levels]
    points = [Point(one.value, rate, f"{one.name}: {rate:,.1f} tokens/s") for one, rate in rates]
    return [
        Chart(
            "Output over load",
            _load_label(levels),
            "output tokens/s",
            scale.levels([point.x for point in points]),
            scale.linear(point.y for point in points),
            [Series("output", points)],
        )
    ]


def of_two_runs(before: Sequence[Level], after: Sequence[Level]) -> list[Chart]:
    """The distributions of both, for each level that both have."""
    known = {level.name: level for level in before}
    found = []
    for level in after:
        if level.name in known:
            pair = {"before": known[level.name], "after": level}
            for name in _LATENCIES:
                samples = {
                    when: one.cdf_ms[name] for when, one in pair.items() if name in one.cdf_ms
                }
                found += _distribution(samples, name, f" at {level.name}")
    return found


def _over_load(
    levels: Sequence[Level],
    name: str,
    percentiles: Sequence[str] = _PERCENTILES,
    bound: float | None = None,
) -> list[Chart]:
    shown = [level for level in levels if name in level.latency_ms]
    if not shown:
        return []
    series = [
        Series(
            percentile,
            [_point(level, getattr(level.latency_ms[name], percentile)) for level in shown],
        )
        for percentile in percentiles
    ]
    if bound is not None:
        ends = {min(level.value for level in shown), max(level.value for level in shown)}
        series.append(Series(f"SLO {bound:g} ms", [Point(x, bound) for x in sorted(ends)]))
    return [
        Chart(
            f"{_TITLES[name]} over load",
            _load_label(shown),
            "ms",
            scale.levels([level.value for level in shown]),
            scale.linear(point.y for one in series for point in one.points),
            series,
        )
    ]


def _throughput(levels: Sequence[Level], name: str) -> list[Chart]:
    shown = [level for level in levels if name in level.latency_ms]
    if not shown:
        return []
    points = [
        Point(
            level.latency_ms[name].p50,
            level.throughput.output_tokens_per_s,
            f"{level.name}: {level.throughput.output_tokens_per_s:,.1f} tokens/s",
            f"{level.value:g}",
        )
        for level in shown
    ]
    return [
        Chart(
            f"Throughput over {_LATENCIES[name][0].lower()}{_LATENCIES[name][1:]}",
            f"{_LATENCIES[name]}, p50, ms",
            "output tokens/s",
            scale.linear(point.x for point in points),
            scale.linear(point.y for point in points),
            [Series(f"by {_load_label(shown)}", points)],
        )
    ]


def _by_level(levels: Sequence[Level], name: str) -> dict[str, list[float]]:
    return {level.name: level.cdf_ms[name] for level in levels if name in level.cdf_ms}


def _distribution(samples: dict[str, list[float]], name: str, where: str = "") -> list[Chart]:
    """The cumulative distribution of each sample, given as its quantiles from 0 to 100 %."""
    values = [value for sample in samples.values() for value in sample]
    if not values:
        return []
    # A gap may be 0: two responses that were read together.
    positive = [value for value in values if value > 0]
    is_wide = bool(positive) and max(positive) >= 30 * min(positive)
    floor = max(min(positive, default=1.0), max(values) / 1e4)
    x = (
        scale.logarithmic([max(value, floor) for value in values])
        if is_wide
        else (scale.linear(values))
    )
    series = [
        Series(
            label,
            [
                Point(max(value, floor) if is_wide else value, share / (len(sample) - 1))
                for share, value in enumerate(sample)
            ],
        )
        for label, sample in samples.items()
    ]
    title = f"{_LATENCIES[name]}: distribution{where}"
    return [Chart(title, "ms", "share at or below", x, scale.linear([1.0]), series)]


def _point(level: Level, ms: float) -> Point:
    return Point(level.value, ms, f"{level.name}: {ms:,.2f} ms")


def _load_label(levels: Sequence[Level]) -> str:
    kind = levels[0].kind
    return _LOAD_LABELS.get(kind, kind)
