"""Timing of kernels, and the ceilings that they are compared with.

A CUDA graph holds many launches, which cycle through several sets of operands. The sets together
are several times the size of L2, so every launch reads its operands from memory; if an operation is
too small for that, its row has `cold: false`. A replay is timed with events and divided by the
number of launches, so gaps between kernels on the device count, but host time does not. Reported
are the median, minimum and maximum over the replays. The ceilings, a large copy and a large GEMM,
are measured in the same process.

    PYTHONPATH=benchmarks python benchmarks/kernels/timing.py    prints the GPU and its ceilings
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import result

COLD_BYTES = 256 * 2**20
"""Total size of the operand sets: several times the 50 MB of L2 of a Hopper GPU."""

_MAX_SETS = 256
_MIN_CALLS = 32
_REPLAYS = 30
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one call, in microseconds.

    Attributes:
        median, min, max: over the replays.
        cold: whether the operands were read from memory rather than from L2.
    """

    median: float
    min: float
    max: float
    cold: bool

    def row(self, num_bytes: int = 0, flops: int = 0) -> dict[str, Any]:
        """Fields of a result row, with bandwidth or throughput."""
        found: dict[str, Any] = {
            "us": round(self.median, 2),
            "min_us": round(self.min, 2),
            "max_us": round(self.max, 2),
            "cold": self.cold,
        }
        if num_bytes:
            found["tb_per_s"] = round(num_bytes / self.median * 1e-6, 3)
        if flops:
            found["tflop_per_s"] = round(flops / self.median * 1e-6, 1)
        return found


def measure(make: Callable[[], Callable[[], object]], num_bytes: int) -> Timing:
    """Time a call.

    Args:
        make: allocates a set of operands and returns a call on it that can be captured.
        num_bytes: bytes read and written by a call, which determine the number of sets.
    """
    sets = max(2, min(_MAX_SETS, -(-COLD_BYTES // max(num_bytes, 1))))
    calls = [make() for _ in range(sets)]
    rounds = -(-_MIN_CALLS // sets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles and loads what a capture may not
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = _replay(graph, rounds * sets)
    return Timing(statistics.median(times), min(times), max(times), sets * num_bytes >= COLD_BYTES)


def _replay(graph: torch.cuda.CUDAGraph, num_calls: int) -> list[float]:
    for _ in range(_WARM_UP):
        graph.replay()
    times = []
    for _ in range(_REPLAYS):
        started = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) * 1e3 / num_calls)
    return times


# ---------------------------------------------------------------- ceilings


def copy_ceiling() -> dict[str, Any]:
    """A pass over 1 GiB: the bandwidth of reads and writes together."""
    # Not copy_: it is captured as a memcpy node, which reached 2.8 TB/s; kernels reach 4.2.
    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    num_bytes = 2 * source.numel() * source.element_size()
    timing = measure(lambda: lambda: torch.neg(source, out=target), num_bytes)
    return {"op": "ceiling: a pass over 1 GiB", **timing.row(num_bytes)}


def gemm_ceiling(size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A square GEMM of random matrices by cuBLAS, at the clock that the power limit allows."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def make() -> Callable[[], Tensor]:
        return lambda: torch.mm(a, b, out=out)

    timing = measure(make, 3 * a.numel() * a.element_size())
    return {"op": f"ceiling: {size}^3 {dtype} by cuBLAS", **timing.row(flops=2 * size**3)}


def machine() -> dict[str, Any]:
    """The machine on which the numbers were measured."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


# ---------------------------------------------------------------- report


def report(kind: str, rows: Iterable[dict[str, Any]], path: Path | None) -> None:
    """Print each row as soon as it is measured, and write all rows if there is a path.

    Args:
        kind: the kind of kernels, part of the result's name.
        rows: the rows of the result.
        path: the file of the result.
    """
    found = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    if path is not None:
        result.write(path, f"kernels, {kind}", found, machine=machine())


def main() -> None:
    """Print a JSON object of the GPU and its ceilings; null without a GPU."""
    found = None
    if torch.cuda.is_available():
        rows = [copy_ceiling(), gemm_ceiling()]
        _, memory_bytes = torch.cuda.mem_get_info()
        found = {**machine(), "memory_bytes": memory_bytes, "rows": rows}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
