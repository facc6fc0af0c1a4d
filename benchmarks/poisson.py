"""Latency under load: Poisson arrivals at several rates, engine alone and through Triton.

    python benchmarks/poisson.py [--rate RATE,...] [--engine-only] [--set KEY=VALUE ...]
        [--result FILE] [--html FOLDER]

First `inflight bench engine --poisson`, in a process that exits before the next one starts; then a
tritonserver, whose ensemble `generate` gets the load from `inflight bench serve` by gRPC streams.
Arrival times, lengths, seed, ramp and objective are the same, and so is the code that draws and
judges them; docs/benchmarking.md has their definitions. Random weights for a folder without any,
greedy, EOS ignored, no prefix cache, no limit of the queue. Without `tokenizer.json`, the model
gets the synthetic one of serving.py.

With `--rate auto`, each of the two searches its own highest rate, the server beginning with that of
the engine. Otherwise both run the same rates, and `share` is the server's goodput as a share of the
engine's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import engine as alone
import in_process
import result
import serving
from inflight.checkpoint.locate import locate
from inflight.cli.bench.poisson.command import engine_settings
from inflight.cli.bench.serving.results import report as reports
from inflight.cli.bench.serving.results.records import GIVEN_UP
from inflight.cli.bench.serving.results.report import Level, Report, highest
from inflight.deploy import repository

COMMAND = [sys.executable, "-m", "inflight.cli.app", "bench"]
ENGINE, ENSEMBLE = "engine", "generate"
WARM_UP_REQUESTS = 64
_LATENCIES = ("ttft", "tpot", "itl", "e2e")
_PERCENTILES = ("p50", "p95", "p99")


def run_engine(model: str, arguments: Sequence[str], options: argparse.Namespace) -> Report:
    """The report of `inflight bench engine --poisson`, in a subprocess."""
    command = [*COMMAND, "engine", "--poisson", "--json", "--model", model]
    command += ["--device", options.device, *arguments, *_set(options.set)]
    command += ["--slo-ttft-ms", f"{options.slo_ttft_ms:g}"]
    command += ["--slo-tpot-ms", f"{options.slo_tpot_ms:g}", "--rate", options.rate]
    if options.html:
        command += ["--html", str(options.html / "engine.html")]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


def run_server(
    url: str, rate: str, arguments: Sequence[str], options: argparse.Namespace, folder: Path
) -> Report:
    """The report of `inflight bench serve` on the ensemble."""
    path = folder / "serve.json"
    command = [*COMMAND, "serve", "--url", url, "--model", ENSEMBLE, "--rate", rate, *arguments]
    command += ["--slo", f"ttft={options.slo_ttft_ms:g},tpot={options.slo_tpot_ms:g}"]
    command += ["--warmup", str(WARM_UP_REQUESTS), "--json", str(path)]
    if options.html:
        command += ["--html", str(options.html / "generate.html")]
    # Its table would be between those of this script.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return reports.read(path)


def load_arguments(options: argparse.Namespace) -> list[str]:
    """What both commands get."""
    names = ("lengths", "scale", "requests", "duration", "ramp", "seed")
    return [word for name in names for word in (f"--{name}", str(getattr(options, name)))]


def server_rates(asked: str, found: Sequence[Level]) -> str:
    """The rates for the server: those of the engine, or a search from its highest one."""
    if not asked.startswith("auto"):
        return asked
    best = highest(found)
    first = best.value if best else min(level.value for level in found)
    return f"auto:{first:g}"


def row(name: str, level: Level) -> dict[str, Any]:
    """One rate of the engine or the ensemble; latencies in milliseconds."""
    found: dict[str, Any] = {"row": name, "rate": level.value, "requests": level.num_requests}
    found["out_tok_s"] = level.throughput.output_tokens_per_s
    found["goodput_per_s"] = level.goodput_per_s
    found["in_slo"] = level.slo_share
    found["meets_slo"] = "yes" if level.meets_slo else "no"
    for latency in _LATENCIES:
        summary = level.latency_ms.get(latency)
        for percentile in _PERCENTILES:
            if summary is not None:
                found[f"{latency}_{percentile}"] = round(getattr(summary, percentile), 2)
    found["sent_late"] = level.client.num_late
    found["given_up"] = level.errors.get(GIVEN_UP, 0)
    found["failed"] = level.num_failed - found["given_up"]
    return found


def compare(own: Sequence[Level], served: Sequence[Level]) -> list[dict[str, Any]]:
    """All rows; those of the ensemble with their shares of the engine's goodput, where both ran a
    rate. The last one has the highest rates that meet the objective."""
    rows = [row(ENGINE, level) for level in own]
    goodput = {level.value: level.goodput_per_s for level in own}
    for level in served:
        found = row(ENSEMBLE, level)
        of = goodput.get(level.value)
        if of and level.goodput_per_s is not None:
            found["share"] = round(level.goodput_per_s / of, 4)
        rows.append(found)
    best, best_served = highest(own), highest(served)
    last: dict[str, Any] = {"row": "highest rate"}
    for name, level_ in ((ENGINE, best), (ENSEMBLE, best_served)):
        if level_ is not None:
            last[name] = level_.value
    if best is not None and best_served is not None:
        last["share"] = round(best_served.value / best.value, 4)
    return [*rows, last]


def show(rows: Sequence[dict[str, Any]]) -> None:
    for found in rows:
        print("  ".join(f"{name} {value}" for name, value in found.items()))


def _set(pairs: Sequence[str]) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--model", default=str(alone.MODEL), help="as for `inflight serve`")
    found.add_argument("--device", default="cuda")
    found.add_argument("--rate", default="auto", help="requests per second, by ','; auto:FIRST")
    found.add_argument("--lengths", default="chat")
    found.add_argument("--scale", type=float, default=1.0, help="factor for the lengths")
    found.add_argument("--requests", type=int, default=1000, help="measured at each rate")
    found.add_argument("--duration", type=float, default=40.0, help="measured seconds of a rate")
    found.add_argument("--ramp", type=float, default=10.0, help="seconds before them")
    found.add_argument("--slo-ttft-ms", type=float, default=500.0)
    found.add_argument("--slo-tpot-ms", type=float, default=30.0)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--set", action="append", metavar="KEY=VALUE", default=[])
    found.add_argument("--engine-only", action="store_true", help="without Triton")
    found.add_argument("--log", type=Path, help="where to write tritonserver's log")
    found.add_argument("--result", type=Path, help="where to write the result")
    found.add_argument("--html", type=Path, help="folder for a page of each report")
    return found


def main() -> None:
    options = parser().parse_args()
    if options.html:
        options.html.mkdir(parents=True, exist_ok=True)
    arguments = load_arguments(options)
    with tempfile.TemporaryDirectory(prefix="inflight-poisson-") as temporary:
        folder = Path(temporary)
        model, source = options.model, locate(options.model)
        if source.format != "gguf" and not (source.path / "tokenizer.json").exists():
            model = str(folder / "model")
            serving.make_model(source.path, folder / "model")
        own = run_engine(model, arguments, options)
        served: list[Level] = []
        settings = engine_settings(model, options.device, in_process.changes(options.set))
        del settings["model"]
        if not options.engine_only:
            models = folder / "models"
            repository.init(model, models, settings=settings)
            rates = server_rates(options.rate, own.levels)
            with serving.serve(models, options.log or folder / "log") as (url, _):
                served = run_server(url, rates, arguments, options, folder).levels
    rows = compare(own.levels, sorted(served, key=lambda level: level.value))
    show(rows)
    if options.result:
        result.write(
            options.result,
            "poisson",
            rows,
            workload="; ".join(f"{name} {text}" for name, text in own.workload.items())
            + f"; p99 of {own.slo} ms",
            machine=alone.machine(own.server["device"]),
            versions={name: own.versions[name] for name in ("python", "torch")},
            settings={"model": Path(options.model).name, **settings},
        )


if __name__ == "__main__":
    main()
