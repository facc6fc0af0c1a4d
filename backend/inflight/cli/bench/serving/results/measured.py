"""The raw results of one level of load."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.cli.bench.serving.results.records import Record
from inflight.cli.bench.serving.results.window import Window


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
        window: which requests are measured, if not all of them.
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
    window: Window | None = None

    @property
    def from_s(self) -> float:
        """Start of the measured window, in seconds from `started`."""
        return self.window.from_s if self.window else 0.0

    def chosen(self) -> list[Record]:
        """The requests that are measured."""
        return [one for one in self.records if one.is_measured]
