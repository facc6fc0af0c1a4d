"""`inflight bench engine`: benchmarks the engine in this process on fixed workloads.

Random token ids, greedy, EOS ignored, no prefix caching. All requests of a row are submitted at
once; its time ends with the last token. A short warm-up run of the same shape precedes each row; of
the measured runs the best one counts, and all are reported.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inflight import config as settings
from inflight.checkpoint.locate import locate
from inflight.cli.bench import start as starting
from inflight.cli.bench.rows import START, Row
from inflight.engine.engine import Engine, generate
from inflight.errors import ConfigError
from inflight.models.quantization.choice import linear_format

MAX_NUM_BATCHED_TOKENS = 8192
MIN_SEQS, MAX_SEQS = 256, 1024
# Enough to compile everything that is compiled on first use, and to raise the clocks.
_WARM_UP_TOKENS = 16384
_WARM_UP_OUTPUT = 4

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """Results.

    Attributes:
        device: name of the GPU, or `cpu`.
        versions: of Python and torch.
        settings: of the engine, as in engine.json.
        start: startup phases in this process -> seconds.
        facts: KV blocks; on a GPU, free memory and the fraction in use after startup.
        rows: flat, one per workload, then those of `start`.
    """

    device: str
    versions: dict[str, str]
    settings: dict[str, Any]
    start: dict[str, float]
    facts: dict[str, Any]
    rows: list[dict[str, Any]]


def engine_settings(
    model: str, device: str, rows: Sequence[Row], changes: dict[str, Any]
) -> dict[str, Any]:
    """Settings as in engine.json for the rows, overridden by `changes`.

    Random weights for a folder without any.
    """
    most = max((row.num_requests for row in rows), default=1)
    found: dict[str, Any] = {
        "model": model,
        "device": device,
        "max_num_seqs": min(MAX_SEQS, max(MIN_SEQS, 1 << (most - 1).bit_length())),
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "max_waiting": max(1024, most),
        "enable_prefix_caching": False,
    }
    if not has_weights(model):
        found["random_weights"] = True
    return {**found, **changes}


def has_weights(model: str) -> bool:
    """Whether there are weights beside a model's config.json; a GGUF file always has some.

    Raises:
        ConfigError: there is no such model.
    """
    checkpoint = locate(model)
    if checkpoint.format == "gguf":
        return True
    return any(checkpoint.path.glob("*.safetensors"))


def run(
    raw: dict[str, Any],
    rows: Sequence[Row],
    *,
    start: bool = False,
    num_runs: int | None = None,
    on_progress: OnProgress = lambda what: None,
    on_row: Callable[[Report], None] = lambda so_far: None,
) -> Report:
    """Run the benchmark.

    Args:
        raw: settings as in engine.json; see `engine_settings`.
        rows: the workloads.
        start: also measure startup, in separate processes.
        num_runs: runs per row, overriding the rows' own.
        on_progress: called with status messages.
        on_row: called with the report so far after each row, so that an aborted run leaves results.

    Raises:
        ConfigError: invalid setting, or a row exceeds the model's context.
        InflightError: a request failed.
    """
    config = settings.parse(raw, "settings")
    checkpoint = dataclasses.replace(locate(config.model), random_weights=config.random_weights)
    quant = linear_format(checkpoint, config.quantization)
    found: list[dict[str, Any]] = []
    if start:  # first: afterwards this process holds the GPU's memory
        on_progress("starting an engine in a new process, cold and warm")
        found = list(_start_rows(raw, quant))
    on_progress("starting the engine")
    started = starting.build(config)
    for row in rows:
        check_fits(row, started.engine)
    bench = EngineBench(started.engine)
    measured: list[dict[str, Any]] = []

    def report() -> Report:
        return Report(
            device=started.device,
            versions=started.versions,
            settings=dict(raw),
            start=started.phases,
            facts=started.facts,
            rows=measured + found,
        )

    for row in rows:
        on_progress(f"{row.name}: {row.workload}")
        times = bench.measure(row, num_runs or row.num_runs)
        figures = row.figures(times)
        on_progress(f"{row.name}: {_found(figures)}")
        measured.append(_row(row, quant, figures))
        on_row(report())
    return report()


class EngineBench:
    """Runs workloads on an engine, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next_id = 1

    def requests(self, row: Row) -> list[Any]:
        """The row's requests, with new ids."""
        made = row.requests(self.engine.runner.vocab_size, self._next_id)
        self._next_id += len(made)
        return made

    def measure(self, row: Row, num_runs: int) -> list[float]:
        """Seconds of each run, from the first submission to the last token."""
        self.run(warm_up(row))
        return [self.run(row) for _ in range(num_runs)]

    def run(self, row: Row) -> float:
        requests = self.requests(row)
        started = time.perf_counter()
        generate(self.engine, requests)
        return time.perf_counter() - started


def warm_up(row: Row) -> Row:
    """A short run of the same shape."""
    return dataclasses.replace(
        row,
        num_requests=max(1, min(row.num_requests, _WARM_UP_TOKENS // row.input_len)),
        output_len=min(row.output_len, _WARM_UP_OUTPUT),
    )


def check_fits(row: Row, engine: Engine) -> None:
    """
    Raises:
        ConfigError: the row's requests are longer than the engine's context.
    """
    needed = row.input_len + row.output_len
    if needed > engine.max_model_len:
        raise ConfigError(
            f"row {row.name}: {needed} tokens exceed the context of {engine.max_model_len}; "
            "choose other rows with --rows, or shorter ones with --scale"
        )


def _row(row: Row, quant: str, figures: dict[str, Any]) -> dict[str, Any]:
    head = {"row": row.name, "workload": row.workload, "quant": quant}
    return {**head, **figures, "metric": row.metric}


def _found(figures: dict[str, Any]) -> str:
    names = ("ms_per_token", "out_tok_s", "prompt_tok_s")
    return ", ".join(f"{name} {figures[name]:,}" for name in names if name in figures)


def _start_rows(raw: dict[str, Any], quant: str) -> Iterator[dict[str, Any]]:
    for cache, startup in starting.measure(raw).items():
        yield {
            "row": START,
            "workload": f"{cache} kernel cache",
            "quant": quant,
            **dataclasses.asdict(startup),
            "metric": "ready_s",
        }
