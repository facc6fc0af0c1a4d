"""The engine on the shapes of several models with random weights, as shares of their rooflines.

    python benchmarks/shapes.py [--shape NAME ...] [--ceilings TB/S,TFLOP/S] [--results FOLDER]
        [options of `inflight bench engine`]

A shape is a folder of models/: config.json, the lengths of its rows in rows.json where they are not
those of `inflight bench engine`, and figures to compare with in bars-h200.json (see bars.py). By
default, all shapes with rows of their own are measured, one after the other. The ceilings of the
GPU are measured before the first; roofline.py describes what follows from them. Each shape's
result is written to FOLDER/engine-GPU-SHAPE.json, also if GPUs do not support the shape: then with
its roofline and the sequences that the KV cache would hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bars
import engine
from inflight import config as settings
from inflight.checkpoint.locate import locate
from inflight.cli.bench.engine import Report, engine_settings
from inflight.cli.bench.rows import START, Row, select
from inflight.cli.bench.show import Show
from inflight.cli.bench.tables import Tables
from inflight.errors import ConfigError
from inflight.kv.budget import gpu_pool_bytes
from inflight.kv.layout import KVTables
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.quantization.choice import UNQUANTISED
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from kv_capacity import KVCapacity
from roofline import Ceilings, Roofline

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
LONG_SEQUENCE = 8192
"""Tokens of the sequences that are counted in the KV cache."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without weights.

    Attributes:
        folder: of its files; its name is the shape's.
        workloads: its rows, as `inflight bench engine --rows` names them.
    """

    folder: Path
    workloads: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def spec(self) -> ModelSpec:
        return read_spec(locate(str(self.folder)))

    @property
    def bars(self) -> bars.Bars:
        path = self.folder / "bars-h200.json"
        return bars.load(path) if path.exists() else bars.Bars()

    def select(self, names: str) -> str:
        """The value of --rows for names of this shape's rows; others keep their meaning."""
        if not self.workloads:
            return names
        every = ",".join([*self.workloads.values(), START])
        known = {**self.workloads, "all": every}
        return ",".join(known.get(name, name) for name in names.split(","))

    def row_name(self, name: str) -> str:
        """The shape's name of a row of `inflight bench engine`."""
        return {workload: own for own, workload in self.workloads.items()}.get(name, name)


def load(name: str) -> Shape:
    """The shape of that name in models/, or in that folder.

    Raises:
        ConfigError: there is no such shape.
    """
    folder = Path(name) if os.sep in name else MODELS / name
    if not (folder / "config.json").exists():
        raise ConfigError(f"{name!r} is unknown; allowed: {', '.join(names())}, or a folder's path")
    path = folder / "rows.json"
    return Shape(folder, json.loads(path.read_text()) if path.exists() else {})


def names() -> list[str]:
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU of this machine.

    Attributes:
        memory_bytes: all of its memory.
    """

    name: str
    torch: str
    memory_bytes: int
    ceilings: Ceilings


def find_gpu() -> Gpu | None:
    """In a subprocess, which frees the GPU's memory when it exits; None without a GPU."""
    done = subprocess.run(
        [sys.executable, HERE / "kernels/timing.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *_python_path()])},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    if found is None:
        return None
    copy, gemm = found["rows"]
    ceilings = Ceilings(copy["tb_per_s"] * 1e12, gemm["tflop_per_s"] * 1e12)
    return Gpu(found["gpu"], found["torch"], found["memory_bytes"], ceilings)


def _python_path() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [given] if given else []


class Benchmark:
    """Measures shapes on one machine.

    Args:
        gpu: of the machine, if it is to be used.
        ceilings: of the device; without them there are no rooflines.
        results: folder of the result files.
    """

    def __init__(self, gpu: Gpu | None, ceilings: Ceilings | None, results: Path) -> None:
        self._gpu = gpu
        self._ceilings = ceilings
        self._results = results

    def run(self, shape: Shape, names: str, arguments: Sequence[str]) -> None:
        """Measure, print and write rows of a shape, or say why GPUs refuse it.

        Args:
            names: of the rows, separated by commas.
            arguments: further options of `inflight bench engine`.

        Raises:
            ConfigError: a row is unknown, or a file of the shape is malformed.
            SystemExit: the benchmark failed, and has printed why.
        """
        obstacle = gpu_obstacle(shape.spec) if self._gpu else None
        if self._gpu and obstacle:
            self._refuse(self._gpu, shape, names, obstacle)
        else:
            self._measure(shape, names, arguments)

    def _measure(self, shape: Shape, names: str, arguments: Sequence[str]) -> None:
        wanted, spec = shape.bars, shape.spec
        rows = ["--rows", shape.select(names)]
        for measured in engine.reports(["--model", str(shape.folder), *rows, *arguments]):
            roofline = self._roofline(spec, measured)
            found = [
                with_roofline(bars.compare(row, wanted), roofline)
                for row in (row | {"row": shape.row_name(row["row"])} for row in measured.rows)
            ]
            report = replace(measured, rows=found)
            kv = KVCapacity(
                spec.kv_layout(_dtype(report), frees_windows=True),
                report.facts["num_blocks"],
                report.facts["block_size"],
            )
            # After each row, so that an interrupted run keeps its results.
            path = self._write(report, wanted.peer, shape, kv)
        Show().report(report, bars.cells)
        self._end(kv, wanted.peer, path)

    def _refuse(self, gpu: Gpu, shape: Shape, names: str, obstacle: str) -> None:
        """Report a refused shape: roofline and KV cache capacity follow from the shape alone."""
        print(f"{shape.name}: not measured: {obstacle}")
        chosen, _ = select(shape.select(names))
        raw = engine_settings(str(shape.folder), "cuda", chosen, {})
        spec, config = shape.spec, settings.parse(raw, "settings")
        layout = spec.kv_layout("bfloat16", frees_windows=True)
        block_bytes = layout.block_bytes(config.block_size)
        max_blocks = KVTables(layout.tables, config.block_size).num_blocks(
            spec.max_model_len(config)
        )
        weight_bytes = 2 * spec.matrix_elements
        pool_bytes = gpu_pool_bytes(config, gpu.memory_bytes, weight_bytes, block_bytes, max_blocks)
        kv = KVCapacity(layout, max(0, pool_bytes) // block_bytes, config.block_size)
        rows = [
            {
                "row": shape.row_name(row.name),
                "workload": row.workload,
                "quant": UNQUANTISED,
                "metric": row.metric,
                "refused": obstacle,
            }
            for row in chosen
        ]
        versions = {"python": platform.python_version(), "torch": gpu.torch}
        report = Report(gpu.name, versions, raw, {}, {}, rows)
        roofline = self._roofline(spec, report)
        report = replace(report, rows=[with_roofline(row, roofline) for row in rows])
        path = self._write(report, "", shape, kv)
        Tables().table("", [bars.cells(row) for row in report.rows])
        self._end(kv, "", path)

    def _roofline(self, spec: ModelSpec, report: Report) -> Roofline | None:
        """None for quantised weights: their products have a ceiling of their own."""
        if self._ceilings is None or engine.quantization(report) != UNQUANTISED:
            return None
        item_bytes = {"float32": 4, "bfloat16": 2}[_dtype(report)]
        return Roofline(spec, self._ceilings, item_bytes, report.settings["max_num_batched_tokens"])

    def _write(self, report: Report, peer: str, shape: Shape, kv: KVCapacity) -> Path:
        path = self._results / engine.default_path(report, shape.name).name
        context: dict[str, Any] = {"kv_cache": kv.report(LONG_SEQUENCE)}
        if self._ceilings is not None:
            context["ceilings"] = {
                "tb_per_s": round(self._ceilings.bytes_per_s / 1e12, 4),
                "tflop_per_s": round(self._ceilings.flops_per_s / 1e12, 2),
            }
        engine.write(path, report, peer, shape.name, **context)
        return path

    def _end(self, kv: KVCapacity, peer: str, path: Path) -> None:
        print(kv.line(LONG_SEQUENCE))
        if peer:
            print(f"peer: {peer}")
        print(f"wrote {path}", file=sys.stderr)


def with_roofline(row: dict[str, Any], roofline: Roofline | None) -> dict[str, Any]:
    """A row of a report with the limit of the device and, if measured, the share of it."""
    lengths = [int(number) for number in re.findall(r"\d+", row["workload"])]
    if roofline is None or row["row"] == START:
        return row
    rate = roofline.rate(Row(row["row"], *lengths))
    found = row | {"roofline": round(rate, 1)}
    if row["metric"] in row:
        found["of_roofline"] = round(row[row["metric"]] / rate, 3)
    return found


def _dtype(report: Report) -> Any:
    given = report.settings.get("dtype", "auto")
    if given != "auto":
        return given
    return "float32" if report.device == "cpu" else "bfloat16"


def read_ceilings(text: str) -> Ceilings:
    """From terabytes and teraFLOPs per second, separated by a comma.

    Raises:
        ValueError: not two positive numbers.
    """
    terabytes, teraflops = (float(number) for number in text.split(","))
    if min(terabytes, teraflops) <= 0:
        raise ValueError(text)
    return Ceilings(terabytes * 1e12, teraflops * 1e12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="of models/, or a folder; repeatable")
    parser.add_argument("--rows", default="", help="names of rows, by ','; default: the shape's")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--ceilings", type=read_ceilings, help="TB/S,TFLOP/S, instead of measuring a GPU's"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder")
    options, arguments = parser.parse_known_args()
    for argument in arguments:
        if argument.partition("=")[0] in ("--model", "--profile"):
            parser.error(f"{argument}: use benchmarks/engine.py")
    try:
        shapes = [load(name) for name in options.shape or names()]
    except ConfigError as error:
        parser.error(f"--shape: {error}")
    if not options.shape:
        shapes = [shape for shape in shapes if shape.workloads]
    gpu = find_gpu() if options.device == "cuda" else None
    if gpu is None and options.device == "cuda":  # a CPU would need days for the default shapes
        parser.error("--device: there is no GPU; allowed: cpu")
    ceilings: Ceilings | None = options.ceilings or (gpu.ceilings if gpu else None)
    benchmark = Benchmark(gpu, ceilings, options.results)
    failed = []
    for shape in shapes:
        rows = options.rows or ",".join(shape.workloads) or "all"
        try:
            benchmark.run(shape, rows, ["--device", options.device, *arguments])
        except (ConfigError, SystemExit) as error:  # the others can still be measured
            failed.append(f"{shape.name} ({error})")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
