"""`inflight bench engine --poisson`: latencies of the engine over the rate of arrivals."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from inflight import config as settings_
from inflight.cli.bench import start as starting
from inflight.cli.bench.engine import has_weights
from inflight.cli.bench.poisson.engine_load import EngineLoad
from inflight.cli.bench.poisson.sender import Due, OpenLoop
from inflight.cli.bench.serving.page import document
from inflight.cli.bench.serving.plan import RATE, Plan, plan
from inflight.cli.bench.serving.results import environment, report
from inflight.cli.bench.serving.results.figures import level as level_of
from inflight.cli.bench.serving.results.report import Level, Report
from inflight.cli.bench.serving.search import RateSearch
from inflight.cli.bench.serving.show import Show
from inflight.cli.bench.serving.workload.lengths import Listed
from inflight.cli.bench.start import Started
from inflight.cli.options import BenchOptions, LoadOptions, PoissonOptions
from inflight.errors import ConfigError

EXIT_INTERRUPTED = 130
ENDPOINT = "engine in process"
# Enough to compile what is compiled on first use, and to guess the highest rate.
WARM_UP_REQUESTS = 64
# A queue is what an open loop shows, so it has no end. Real servers refuse requests instead.
MAX_WAITING = 1_000_000


def run(options: BenchOptions, open_loop: PoissonOptions, changes: dict[str, Any]) -> int:
    """Run what the options ask for, and print it.

    Args:
        changes: settings of engine.json, which override those of the benchmark.

    Returns:
        Exit status: 130 after Ctrl-C, which reports the rates that are complete.

    Raises:
        ConfigError: an option or a file of lengths is not valid, or the model or a setting is not
            supported.
        InflightError: a request of the warm-up failed.
    """
    chosen = plan(_load(options, open_loop))
    if isinstance(chosen.lengths, Listed) and any(one.prompt for one in chosen.lengths.shapes):
        raise ConfigError(
            f"--lengths: {open_loop.lengths} has prompts, but an engine without a tokenizer needs "
            "their lengths; give input_tokens in each line"
        )
    html = open_loop.html
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html: the folder of {html} does not exist; create it first")
    settings = engine_settings(options.model, options.device, changes)
    config = settings_.parse(settings, "settings")
    show = Show()
    began = environment.date()
    show.note("starting the engine")
    rates = Rates(starting.build(config), chosen, show)
    status = 0
    try:
        for _ in rates.run():
            if options.json_:
                _print(_report(began, rates, settings))
    except KeyboardInterrupt:
        show.note("stopped: the rate that was running is not reported")
        status = EXIT_INTERRUPTED
    found = _report(began, rates, settings)
    if not options.json_:
        show.report(found)
    if html is not None:
        report.write_text(html, document.of_run(found))
        show.note(f"wrote {html}")
    return status


def engine_settings(model: str, device: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Settings as in engine.json: those of a server, but without a limit of the queue and without
    prefix caching, since prompts are random. Random weights for a folder without any.

    Raises:
        ConfigError: there is no such model.
    """
    found: dict[str, Any] = {
        "model": model,
        "device": device,
        "max_waiting": MAX_WAITING,
        "enable_prefix_caching": False,
    }
    if not has_weights(model):
        found["random_weights"] = True
    return {**found, **changes}


class Rates:
    """Runs the rates of a plan, one after another.

    Attributes:
        levels: results so far.
        started: the engine.
        plan: with the context of the model.
    """

    def __init__(self, started: Started, chosen: Plan, show: Show) -> None:
        context = started.engine.max_model_len
        self.levels: list[Level] = []
        self.started = started
        self.plan = dataclasses.replace(chosen, max_model_len=context)
        self._show = show
        self._load = EngineLoad(started.engine, chosen.seed)

    def run(self) -> Iterator[Level]:
        """
        Raises:
            ConfigError: the lengths do not fit the model's context.
            InflightError: a request of the warm-up failed.
        """
        self._show.note(f"warm-up: {WARM_UP_REQUESTS} requests at once")
        shapes = itertools.islice(self.plan.shapes("warm-up"), WARM_UP_REQUESTS)
        capacity = self._load.burst(shapes)
        if not self.plan.is_search:
            for rate in self.plan.levels:
                yield self._level(rate)
            return
        search = RateSearch(self.plan.levels[0] if self.plan.levels else capacity)
        while (rate_ := search.next()) is not None:
            level = self._level(rate_)
            search.tried(rate_, bool(level.meets_slo))
            yield level

    def _level(self, rate: float) -> Level:
        chosen = self.plan
        name = f"{RATE} {rate:g}"
        loop = OpenLoop(
            map(Due, chosen.arrivals(rate), chosen.shapes(name)),
            chosen.window(rate),
            chosen.patience_s,
        )
        gc.collect()
        gc.freeze()  # a collection in the middle of a level would delay it
        with self._show.running(name, chosen.limit) as refresh:
            measured = self._load.run(loop, refresh)
        found = level_of(RATE, rate, measured, chosen.slo, None)
        self.levels.append(found)
        self._show.level(found)
        return found


def _load(options: BenchOptions, open_loop: PoissonOptions) -> LoadOptions:
    """
    Raises:
        ConfigError: a bound is not positive.
    """
    return LoadOptions(
        rate=open_loop.rate,
        ramp=open_loop.ramp,
        requests=open_loop.requests,
        duration=open_loop.duration,
        lengths=open_loop.lengths,
        scale=options.scale,
        warmup=WARM_UP_REQUESTS,
        slo=f"ttft={open_loop.slo_ttft_ms:g},tpot={open_loop.slo_tpot_ms:g}",
        seed=open_loop.seed,
    )


def _report(began: str, rates: Rates, settings: dict[str, Any]) -> Report:
    started = rates.started
    # A path is specific to the machine.
    known = {**settings, "model": Path(settings["model"]).name, "device": started.device}
    return Report(
        date=began,
        command=environment.command(sys.argv[1:]),
        commit=environment.commit(),
        machine=environment.machine(),
        versions={
            **environment.versions(),
            # torch's is a subclass of str.
            **{name: str(version) for name, version in started.versions.items()},
        },
        server={"endpoint": ENDPOINT, **{name: str(value) for name, value in known.items()}},
        workload=rates.plan.workload(),
        slo=str(rates.plan.slo or ""),
        levels=sorted(rates.levels, key=lambda level: level.value),
    )


def _print(found: Report) -> None:
    typer.echo(msgspec.json.encode(found).decode())
