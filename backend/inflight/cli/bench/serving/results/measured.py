"""The raw results of one level of load."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.cli.bench.serving.results.records import Record


@dataclass(frozen=True, slots=True)
class Measured:
    """
    Attributes:
        records: in the order of sending.
        started: `time.perf_counter()` at the start.
        window_s: up to the end of the last request, but not longer than the given duration.
        late_s: of each request of an open loop: how much later than planned it was sent.
        lags_s: samples of the event loop's lag.
        cpu_s: CPU time of this process.
        elapsed_s: wall time in which it was used.
        examples: kind of error -> message of the first.
        is_interrupted: `stop` was set before the level's end.
    """

    records: list[Record]
    started: float
    window_s: float
    late_s: list[float]
    lags_s: list[float]
    cpu_s: float
    elapsed_s: float
    examples: dict[str, str]
    is_interrupted: bool
