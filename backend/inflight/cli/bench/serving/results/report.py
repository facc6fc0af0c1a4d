"""The results of a run: data, and the JSON file of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inflight.cli.bench.serving.results.records import RequestTimes
from inflight.errors import ConfigError

FORMAT = "inflight bench serve 1"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a sample; percentiles are interpolated linearly. All in the sample's unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy the load generator itself was.

    Attributes:
        lag_ms: by how much its event loop was late, sampled throughout.
        cpu_share: CPU time of its process per second.
        late_ms: by how much requests of an open loop were sent late; None for a closed loop.
        num_late: those that were sent more than 5 ms late, of all requests of the level.
    """

    lag_ms: Summary
    cpu_share: float
    late_ms: Summary | None
    num_late: int = 0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over the measured window; failed requests count for tokens only."""

    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """One level of load.

    Attributes:
        kind: `concurrency` (closed loop) or `rate` (open loop, requests per second).
        value: the number of either.
        window_s: the measured time: up to the end of the last request, but not longer than the
            given duration.
        is_interrupted: the run was stopped before the level's end.
        num_requests: sent.
        num_completed: without an error; those in flight at an interruption are neither.
        errors: kind -> count.
        error_examples: kind -> message of the first.
        throughput: of the window.
        latency_ms: `ttft`, `itl`, `gap`, `tpot`, `e2e` of completed requests; see `records`.
        tokens_per_response: mean.
        input_tokens, output_tokens: of completed requests; None if there are none.
        goodput_per_s: requests per second that met the SLO; None without an SLO.
        slo_share: fraction of the requests that met it.
        cost: `output` and `total`, per million tokens; None without --cost.
        cdf_ms: metric -> 101 quantiles, 0 to 100 %.
        tokens_each_s: output tokens received in each full second of the window.
        client: see ClientLoad.
        requests: the measured ones, in the order of sending.
        ramp_s: seconds before the window; if it is above 0, the requests that were due in the
            window are measured, and others before and after it are only load.
        meets_slo: whether the 99th percentiles are within the SLO; None without one.
    """

    kind: str
    value: float
    window_s: float
    is_interrupted: bool
    num_requests: int
    num_completed: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    throughput: Throughput
    latency_ms: dict[str, Summary]
    tokens_per_response: float
    input_tokens: Summary | None
    output_tokens: Summary | None
    goodput_per_s: float | None
    slo_share: float | None
    cost: dict[str, float] | None
    cdf_ms: dict[str, list[float]]
    tokens_each_s: list[int]
    client: ClientLoad
    requests: list[RequestTimes]
    ramp_s: float = 0.0
    meets_slo: bool | None = None

    @property
    def name(self) -> str:
        unit = "/s" if self.kind == "rate" else ""
        return f"{self.kind} {self.value:g}{unit}"

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())


@dataclass(frozen=True, slots=True)
class Report:
    """
    Attributes:
        date: when the run began, in UTC, ISO 8601.
        command: that repeats it, without keys.
        commit: of the load generator's checkout, or its version.
        machine: of the load generator: `cpu`, `cores`, `GiB of memory`.
        versions: `inflight`, `python`, `system`.
        server: `endpoint`, `url`, `model`, and what the server reports about itself.
        workload: in words: lengths, prompts, seed.
        slo: as given; "" without one.
        levels: in the order of the run.
        format: of the file.
    """

    date: str
    command: str
    commit: str
    machine: dict[str, str]
    versions: dict[str, str]
    server: dict[str, str]
    workload: dict[str, str]
    slo: str
    levels: list[Level]
    format: str = FORMAT


def highest(levels: Sequence[Level]) -> Level | None:
    """The open loop with the highest rate that meets the SLO; None if none does."""
    met = [level for level in levels if level.kind == "rate" and level.meets_slo]
    return max(met, key=lambda level: level.value, default=None)


def write(report: Report, path: Path) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError: the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read(path: Path) -> Report:
    """
    Raises:
        ConfigError: the file cannot be read, or is not a report.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        report = msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a report of `inflight bench serve --json`: {error}"
        ) from None
    if report.format != FORMAT:
        raise ConfigError(f"{path} has the format {report.format!r}; allowed: {FORMAT!r}")
    return report
