"""From the records of a level to its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inflight.cli.bench.serving.lag import WARN_ABOVE_MS
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.records import (
    GIVEN_UP,
    UNFINISHED,
    Record,
    RequestTimes,
    gaps_of,
    times_of,
)
from inflight.cli.bench.serving.results.report import ClientLoad, Level, Summary, Throughput
from inflight.cli.bench.serving.results.slo import Slo

Array = NDArray[np.float64]

METRICS = ("ttft", "itl", "gap", "tpot", "e2e")
_PERCENTILES = (50, 90, 95, 99)


def summary(values: Sequence[float], weights: Sequence[float] | None = None) -> Summary | None:
    """
    Args:
        weights: how often each value counts; once by default.

    Returns:
        None for an empty sample.
    """
    if len(values) == 0:
        return None
    sample = np.asarray(values, float)
    counts = np.ones(len(sample)) if weights is None else np.asarray(weights, float)
    p50, p90, p95, p99 = (float(value) for value in quantiles(sample, counts, _PERCENTILES))
    mean = float(np.average(sample, weights=counts))
    figures = (round(value, 4) for value in (mean, p50, p90, p95, p99, float(sample.max())))
    return Summary(round(float(counts.sum())), *figures)


def quantiles(values: Array, weights: Array, percentiles: Sequence[float]) -> Array:
    """Percentiles of a sample in which each value occurs `weights` times, with linear
    interpolation as by numpy; weights below 1 count as they are."""
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    # Value i takes the places [ends - weight, ends - 1] of the expanded, sorted sample.
    ends = np.cumsum(weights)
    places = np.asarray(percentiles, float) / 100 * max(0.0, ends[-1] - 1)
    firsts, lasts = ends - weights, np.maximum(ends - 1, ends - weights)
    found: Array = np.interp(
        places, np.ravel(np.column_stack((firsts, lasts))), np.repeat(values, 2)
    )
    return found


def level(
    kind: str, value: float, measured: Measured, slo: Slo | None, cost_per_hour: float | None
) -> Level:
    """
    Args:
        kind, value: of the load; see Level.
        cost_per_hour: of the server, in any currency.
    """
    records = measured.chosen()
    times = [times_of(record, measured.started) for record in records]
    completed = [one for one in times if not one.error]
    done = [record for record in records if record.error in ("", GIVEN_UP)]
    samples = _samples(done, [one for one in times if one.error in ("", GIVEN_UP)])
    window_s = measured.window_s or 1e-9
    throughput = _throughput(measured, window_s)
    met = [slo.is_met(one) for one in times if one.error != UNFINISHED] if slo else []
    good = [
        slo is not None
        and slo.is_met(one)
        # In a steady state, as many end outside the window as do in it that began outside.
        and (measured.window or one.sent_s + one.e2e_ms / 1e3 <= window_s + 1e-6)
        for one in times
    ]
    num_responses = sum(len(record.arrivals) for record in records if not record.error)
    return Level(
        kind=kind,
        value=value,
        window_s=round(window_s, 4),
        is_interrupted=measured.is_interrupted,
        num_requests=len(times),
        num_completed=len(completed),
        errors=dict(Counter(one.error for one in times if one.error not in ("", UNFINISHED))),
        error_examples=measured.examples,
        throughput=throughput,
        latency_ms={
            name: found
            for name, (values, weights) in samples.items()
            if (found := summary(values, weights)) is not None
        },
        tokens_per_response=round(
            sum(one.output_tokens for one in completed) / max(1, num_responses), 4
        ),
        input_tokens=summary([one.input_tokens for one in completed]),
        output_tokens=summary([one.output_tokens for one in completed]),
        goodput_per_s=round(sum(map(bool, good)) / window_s, 4) if slo else None,
        slo_share=round(sum(met) / max(1, len(met)), 4) if slo else None,
        cost=_cost(throughput, cost_per_hour),
        cdf_ms={name: cdf(*sample) for name, sample in samples.items() if sample[0]},
        tokens_each_s=_tokens_each_s(measured, window_s),
        client=_client_load(measured),
        requests=times,
        ramp_s=measured.from_s,
        meets_slo=slo.is_met_at_p99(times) if slo and not measured.is_interrupted else None,
    )


Sample = tuple[list[float], list[float] | None]
"""Values in milliseconds and their weights."""


def _samples(done: Sequence[Record], times: Sequence[RequestTimes]) -> dict[str, Sample]:
    gaps = [one for record in done for one in gaps_of(record.settled())]
    return {
        "ttft": ([one.ttft_ms for one in times if one.ttft_ms is not None], None),
        "itl": ([gap * 1e3 / count for gap, count in gaps], [count for _, count in gaps]),
        "gap": ([gap * 1e3 for gap, _ in gaps], None),
        "tpot": ([one.tpot_ms for one in times if one.tpot_ms is not None], None),
        "e2e": ([one.e2e_ms for one in times], None),
    }


def cdf(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The 101 quantiles from 0 to 100 %."""
    sample = np.asarray(values, float)
    counts = np.ones(len(sample)) if weights is None else np.asarray(weights, float)
    return [round(float(one), 4) for one in quantiles(sample, counts, range(101))]


def _throughput(measured: Measured, window_s: float) -> Throughput:
    """Tokens count when they arrive, prompts when they are answered with the first token."""
    begin = measured.started + measured.from_s
    end = begin + window_s + 1e-6
    num_requests, num_input, num_output = 0, 0, 0.0
    for record in measured.records:
        arrivals = record.settled()
        num_output += sum(count for at, count in arrivals if begin <= at <= end)
        if arrivals and begin <= arrivals[0][0] <= end:
            num_input += record.num_input_tokens
        num_requests += not record.error and begin <= record.ended <= end
    return Throughput(
        requests_per_s=round(num_requests / window_s, 4),
        output_tokens_per_s=round(num_output / window_s, 2),
        input_tokens_per_s=round(num_input / window_s, 2),
        tokens_per_s=round((num_input + num_output) / window_s, 2),
    )


def _tokens_each_s(measured: Measured, window_s: float) -> list[int]:
    found = [0.0] * int(window_s)
    for record in measured.records:
        for at, count in record.settled():
            second = math.floor(at - measured.started - measured.from_s)
            if 0 <= second < len(found):
                found[second] += count
    return [round(count) for count in found]


def _cost(throughput: Throughput, per_hour: float | None) -> dict[str, float] | None:
    if per_hour is None or throughput.output_tokens_per_s <= 0:
        return None
    rates = {"output": throughput.output_tokens_per_s, "total": throughput.tokens_per_s}
    return {name: round(per_hour / 3600 / rate * 1e6, 4) for name, rate in rates.items()}


def _client_load(measured: Measured) -> ClientLoad:
    nothing = Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return ClientLoad(
        lag_ms=summary([lag * 1e3 for lag in measured.lags_s]) or nothing,
        cpu_share=round(measured.cpu_s / (measured.elapsed_s or 1e-9), 4),
        late_ms=summary([late * 1e3 for late in measured.late_s]),
        num_late=sum(late * 1e3 > WARN_ABOVE_MS for late in measured.late_s),
    )
