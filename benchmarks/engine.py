"""The engine on fixed workloads, against another engine's figures on the same kind of machine.

    python benchmarks/engine.py [--result FILE] [--bars FILE] [options of `inflight bench engine`]

That command does the measuring; backend/inflight/cli/bench/engine.py describes its method. This
script compares its rows with the figures of --bars (see bars.py). Without --model, it uses the
shape of Llama-3.1-8B with random weights, and the bars of an H200, which include vLLM's figures.
The result is written to results/engine-GPU.json, with quantisation to
results/engine-GPU-QUANTISATION.json, with a KV cache of 8 bits to results/engine-GPU-...-KV.json,
and with `--set batch_invariant=true` to results/engine-GPU-batch-invariant.json. With --profile DIR
nothing is timed, and all output goes to DIR.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bars
import result
from inflight.cli.bench.engine import Report
from inflight.cli.bench.show import Show
from inflight.errors import ConfigError
from inflight.models.quantization.choice import UNQUANTISED

MODEL = result.ROOT / "benchmarks/models/llama-3.1-8b"
BARS = MODEL / "bars-h200.json"
COMMAND = [sys.executable, "-m", "inflight.cli.app", "bench", "engine"]


def reports(arguments: Sequence[str]) -> Iterator[Report]:
    """Run `inflight bench engine` in a subprocess, which frees its GPU memory when it exits.

    Yields the measurements so far after each row, and all of them at the end.
    """
    with subprocess.Popen([*COMMAND, "--json", *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Report(**json.loads(line))
    if process.returncode != 0:
        sys.exit(process.returncode)


def measure(arguments: Sequence[str]) -> Report:
    """The last of `reports`."""
    *_, report = reports(arguments)
    return report


def machine(device: str) -> dict[str, Any]:
    return result.cpu() if device == "cpu" else result.gpu()


def quantization(report: Report) -> str:
    """The format of the linear layers, by the setting or the checkpoint."""
    return next((str(row["quant"]) for row in report.rows), UNQUANTISED)


def mode(report: Report) -> list[str]:
    """How the engine ran that differs from the defaults, in words."""
    words = [] if quantization(report) == UNQUANTISED else [quantization(report)]
    cached = report.settings.get("kv_cache_dtype", "auto")
    if cached != "auto":
        words.append(f"{cached} kv")
    if report.settings.get("batch_invariant"):
        words.append("batch invariant")
    return words


def default_path(report: Report, shape: str = "") -> Path:
    """results/engine-h200.json for an `NVIDIA H200`; a shape's name, if any, follows."""
    words = ["engine", report.device.removeprefix("NVIDIA "), *([shape] if shape else [])]
    words += mode(report)
    name = "-".join(words).lower().replace(" ", "-")
    return result.ROOT / "benchmarks/results" / f"{name}.json"


def settings(report: Report) -> dict[str, Any]:
    """The engine's settings, with the model's name only: its path is specific to the machine."""
    return {**report.settings, "model": Path(report.settings["model"]).name}


def write(path: Path, report: Report, peer: str, shape: str = "", **more: Any) -> None:
    """Write the measurements.

    Args:
        peer: describes the column of that name.
        shape: name of the model's shape, if it is not this script's own.
        more: further facts.
    """
    result.write(
        path,
        ", ".join(["engine", *([shape] if shape else []), *mode(report)]),
        report.rows,
        workload="Requests x input/output tokens, random ids, greedy, no prefix cache, in process",
        machine=machine(report.device),
        versions=report.versions,
        settings=settings(report),
        start=report.start,
        facts=report.facts,
        peer=peer,
        **more,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, help="where to write the result")
    parser.add_argument("--bars", type=Path, help="JSON file of figures to compare with")
    options, arguments = parser.parse_known_args()
    if "--model" not in arguments:
        arguments = ["--model", str(MODEL), *arguments]
        options.bars = options.bars or BARS
    try:
        wanted = bars.load(options.bars) if options.bars else bars.Bars()
    except ConfigError as error:
        parser.error(f"--bars {error}")
    if "--profile" in arguments:  # it writes its own files
        sys.exit(subprocess.run([*COMMAND, *arguments], check=False).returncode)
    for measured in reports(arguments):
        report = replace(measured, rows=[bars.compare(row, wanted) for row in measured.rows])
        path = options.result or default_path(report)
        # After each row, so that an interrupted run keeps its results.
        write(path, report, wanted.peer)
    Show().report(report, bars.cells)
    if any("peer" in row for row in report.rows):
        print(f"peer: {wanted.peer}")
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
