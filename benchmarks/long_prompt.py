"""Inter-token latency (ITL) of running streams while a long prompt is computed, by `itl_target_ms`
and `ttft_target_ms`.

    python benchmarks/long_prompt.py [--model MODEL] [--device cuda] [--streams 64] [--prompt 30000]
        [--targets 0 10 30 30:5000 30:7000] [--runs 3] [--result FILE] [--set NAME=VALUE ...]

Streams decode; then a prompt joins them. `before` are the steps without it, `during` those until
its first token. A target is that of the ITL, or those of the ITL and the TTFT; 0 is none. The
targets share one engine's weights, and each learns the times of steps anew, from the first prompts
of the streams on. Random weights and greedy sampling, as in `inflight bench engine`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

import in_process
import result
from inflight import config as settings
from inflight.cli.bench import engine as bench
from inflight.cli.bench import start
from inflight.cli.bench.rows import Row
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine
from inflight.execution.runner import Runner

PROMPT_ID = 1_000_000
_STREAM_PROMPT = 512
_STEPS_BEFORE = 200
_SETTLE_STEPS = 20


def run(engine: Engine, streams: list[Request], prompt: Request) -> tuple[list[float], list[float]]:
    """Seconds between steps with tokens of streams, before and during the prompt."""
    for request in streams:
        engine.submit(request)
    waiting = {request.request_id for request in streams}
    while waiting:
        waiting -= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(_SETTLE_STEPS):
        engine.step()
    before = _gaps(engine, lambda ids, steps: steps == _STEPS_BEFORE)
    engine.submit(prompt)
    during = _gaps(engine, lambda ids, steps: prompt.request_id in ids)
    for request in streams:
        engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()
    return before, during


def _gaps(engine: Engine, is_over: Any) -> list[float]:
    found: list[float] = []
    last = time.perf_counter()
    while True:
        ids = {event.request_id for event in engine.step() if event.token_ids}
        now = time.perf_counter()
        if ids - {PROMPT_ID}:
            found.append(now - last)
            last = now
        if is_over(ids, len(found)):
            return found


def measure(
    config: EngineConfig, runner: Runner, max_model_len: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each target."""
    next_id = 1
    for itl, ttft in args.targets:
        changed = msgspec.structs.replace(config, itl_target_ms=itl, ttft_target_ms=ttft)
        engine = Engine(changed, runner, max_model_len, [])
        figures: dict[str, list[float]] = {}
        for index in range(args.runs + 1):
            row = Row("streams", args.streams, _STREAM_PROMPT, 100_000)
            streams = row.requests(runner.vocab_size, next_id)
            next_id += args.streams
            limit = max_model_len - _STREAM_PROMPT
            streams = [_with_output(one, min(limit, row.output_len)) for one in streams]
            (prompt,) = Row("prompt", 1, args.prompt, 1).requests(runner.vocab_size, PROMPT_ID)
            before, during = run(engine, streams, prompt)
            if index == 0:
                continue  # warm-up
            for name, gaps in (("before", before), ("during", during)):
                for percent in (50, 99):
                    value = float(np.percentile(gaps, percent)) * 1e3
                    figures.setdefault(f"{name}_p{percent}_ms", []).append(value)
            figures.setdefault("ttft_s", []).append(sum(during))
            figures.setdefault("steps", []).append(len(during))
        yield {
            "itl_target_ms": itl,
            "ttft_target_ms": ttft,
            "streams": args.streams,
            "prompt_tokens": args.prompt,
            **{name: result.spread(values) for name, values in figures.items()},
        }


def _targets(text: str) -> tuple[float | None, float | None]:
    """Of ITL and TTFT, from ITL or ITL:TTFT."""
    itl, _, ttft = text.partition(":")
    return float(itl) or None, float(ttft or 0) or None


def _with_output(request: Request, num_tokens: int) -> Request:
    params = msgspec.structs.replace(request.params, max_tokens=num_tokens)
    return msgspec.structs.replace(request, params=params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    in_process.add_options(parser)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=30_000)
    default = [_targets(text) for text in ("0", "10", "30", "30:5000", "30:7000")]
    parser.add_argument("--targets", type=_targets, nargs="+", default=default)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    rows = [Row("streams", args.streams, _STREAM_PROMPT, 2)]
    raw = bench.engine_settings(args.model, args.device, rows, in_process.changes(args.set))
    started = start.build(settings.parse(raw, "settings"))
    engine = started.engine
    found = []
    for row in measure(engine.config, engine.runner, engine.max_model_len, args):
        print(row, flush=True)
        found.append(row)
    in_process.write(args, "long prompt", found, settings=raw)


if __name__ == "__main__":
    main()
