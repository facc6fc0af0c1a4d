"""Reports of load tests, for tests of what is made of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from inflight.cli.bench.serving.results.figures import level
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.records import Record
from inflight.cli.bench.serving.results.report import Level, Report
from inflight.cli.bench.serving.results.slo import Slo
from inflight.cli.bench.serving.results.window import Window


def record(
    sent: float, *arrivals: tuple[float, int], error: str = "", due: float | None = None
) -> Record:
    """A request with 10 input tokens whose stream ends with its last response."""
    ended = arrivals[-1][0] if arrivals else sent
    return Record(sent, list(arrivals), ended, num_input_tokens=10, error=error, due=due)


def measured(
    *records: Record,
    window_s: float | None = None,
    lag_ms: float = 0.1,
    window: Window | None = None,
    late_s: Sequence[float] = (),
) -> Measured:
    """Of a level that started at 0."""
    elapsed_s = max((one.ended for one in records), default=1.0)
    if window is not None:
        window_s = window.length_s
        for one in records:
            one.is_measured = window.has(one.began)
    return Measured(
        records=list(records),
        started=0.0,
        window_s=elapsed_s if window_s is None else window_s,
        late_s=list(late_s),
        lags_s=[lag_ms / 1e3] * 10,
        cpu_s=0.25 * elapsed_s,
        elapsed_s=elapsed_s,
        examples={one.error: f"what {one.error} says" for one in records if one.error},
        is_interrupted=False,
        window=window,
    )


def random_level(
    concurrency: int, itl_s: float, seed: int = 0, slo: Slo | None = None, num_requests: int = 60
) -> Level:
    """Requests with TTFTs of about 50 ms, and 20 further tokens."""
    source = random.Random(seed)
    records = []
    for index in range(num_requests):
        at = index / 10
        times = [at + source.uniform(0.03, 0.07)]
        for _ in range(20):
            times.append(times[-1] + itl_s * source.uniform(0.8, 1.2))
        records.append(record(at, *((one, 1) for one in times)))
    return level("concurrency", concurrency, measured(*records), slo, 3.6)


def steady_level(rate: float, ttft_s: float, slo: Slo, num_requests: int = 300) -> Level:
    """An open loop of requests with two tokens; TTFTs are spread evenly up to `ttft_s`."""
    window = Window(1.0, 1.0 + num_requests / rate)
    records = []
    for index in range(num_requests):
        due = 1.0 + index / rate
        first = due + ttft_s * (index + 1) / num_requests
        records.append(record(due, (first, 1), (first + 0.01, 1), due=due))
    return level("rate", rate, measured(*records, window=window, late_s=[0.0]), slo, None)


def report(*levels: Level, command: str = "inflight bench serve", slo: str = "") -> Report:
    return Report(
        date="2026-11-23T00:00:00+00:00",
        command=command,
        commit="0123abc",
        machine={"cpu": "a CPU", "cores": "2"},
        versions={"inflight": "0.1.0"},
        server={"endpoint": "grpc", "url": "127.0.0.1:8001", "model": "generate"},
        workload={"lengths": "chat", "seed": "0"},
        slo=slo,
        levels=list(levels),
    )
