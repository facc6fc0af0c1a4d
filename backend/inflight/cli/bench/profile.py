"""`inflight bench engine --profile`: profiles a step with torch.profiler, kernel by kernel.

On a GPU only the device is traced: tracing the host would slow it down, and its time shows as the
gap. Nothing here imports torch before the engine is built (see `factory.build`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inflight import config as settings
from inflight.cli.bench import picture, start, trace
from inflight.cli.bench.engine import EngineBench, OnProgress, check_fits
from inflight.cli.bench.rows import Row
from inflight.cli.bench.trace import Profile, StepProfile
from inflight.core.request import TokenEvent
from inflight.engine.engine import Engine
from inflight.errors import ConfigError, EngineError

# Decode steps before the traced ones, for graphs and clocks to stabilise.
_SETTLE_STEPS = 4


def run(
    raw: dict[str, Any],
    rows: Sequence[Row],
    num_steps: int,
    folder: Path,
    on_progress: OnProgress = lambda what: None,
) -> list[Profile]:
    """Profile steady decode steps and a full prefill step of each row.

    The decode steps run as many of the row's requests as fit; its prompts fill the prefill step.
    Writes two traces, profile.json and profile.svg into `folder`, or a subfolder per row if there
    are several.

    Args:
        raw: settings as in engine.json; see `engine.engine_settings`.
        num_steps: decode steps to average over.

    Raises:
        ConfigError: invalid setting, or a row leaves no room in the context for the steps.
        EngineError: a request failed.
    """
    on_progress("starting the engine")
    started = start.build(settings.parse(raw, "settings"))
    bench = EngineBench(started.engine)
    found = []
    for row in rows:
        on_progress(f"{row.name}: {row.workload}")
        target = folder if len(rows) == 1 else folder / row.name.replace("/", "_")
        target.mkdir(parents=True, exist_ok=True)
        check_fits(row, started.engine)
        steps = [_decode(bench, row, num_steps, target), _prefill(bench, row, target)]
        found.append(Profile(row.name, row.workload, started.device, steps))
        text = json.dumps(found[-1].as_json(), indent=1)
        (target / "profile.json").write_text(text + "\n")
        title = f"A step of {row.workload} on {started.device}"
        (target / "profile.svg").write_text(picture.svg(title, steps))
    return found


def _prefill(bench: EngineBench, row: Row, folder: Path) -> StepProfile:
    """One step with as many prompt tokens as the settings allow."""
    engine = bench.engine
    prompts = dataclasses.replace(
        row,
        num_requests=max(1, min(_at_once(row, engine), _budget(engine) // row.input_len)),
        output_len=1,
    )
    untraced_us = min(bench.run(prompts) for _ in range(3)) * 1e6
    for request in bench.requests(prompts):
        engine.submit(request)
    events = _trace(folder / "prefill.trace.json", lambda: _step(engine))
    while engine.has_work:
        _step(engine)
    return trace.aggregate(events, "prefill", 1, round(untraced_us, 1))


def _decode(bench: EngineBench, row: Row, num_steps: int, folder: Path) -> StepProfile:
    """Steps in which every request of the row decodes a token."""
    engine = bench.engine
    room = engine.max_model_len - row.input_len
    count = _at_once(row, engine)
    # The first requests decode already while the last prompts are prefilled.
    prefill_steps = -(-count * row.input_len // max(1, _budget(engine) - count))
    needed = 2 * prefill_steps + _SETTLE_STEPS + 2 * num_steps
    if room < needed:
        raise ConfigError(
            f"row {row.name}: {num_steps} decode steps need room for {needed} tokens after the "
            f"prompt, and the context of {engine.max_model_len} leaves {room}"
        )
    requests = bench.requests(dataclasses.replace(row, num_requests=count, output_len=room))
    for request in requests:
        engine.submit(request)
    waiting = {request.request_id for request in requests}
    while waiting:
        waiting -= {event.request_id for event in _step(engine)}

    def decode(steps: int) -> None:
        for _ in range(steps):
            _step(engine)

    decode(_SETTLE_STEPS)
    _wait_for_device()
    started = time.perf_counter()
    decode(num_steps)
    _wait_for_device()
    untraced_us = (time.perf_counter() - started) / num_steps * 1e6
    events = _trace(folder / "decode.trace.json", lambda: decode(num_steps))
    for request in requests:
        engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()
    return trace.aggregate(events, "decode", num_steps, round(untraced_us, 1))


def _at_once(row: Row, engine: Engine) -> int:
    return min(row.num_requests, engine.config.max_num_seqs)


def _budget(engine: Engine) -> int:
    return engine.config.max_num_batched_tokens


def _step(engine: Engine) -> list[TokenEvent]:
    events = engine.step()
    for event in events:
        if event.error is not None:
            raise EngineError(event.error)
    return events


def _trace(path: Path, call: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of a call, device work included; the trace is kept at `path`."""
    import torch
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    # The first session initialises tracing, which takes a while.
    with torch.profiler.profile(activities=[activity]):
        _wait_for_device()
    with torch.profiler.profile(activities=[activity]) as session:
        call()
        _wait_for_device()
    session.export_chrome_trace(str(path))
    return trace.read(path)


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
