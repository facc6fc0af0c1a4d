"""Result files: rows with their context."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


@functools.cache
def commit(checkout: Path = ROOT) -> str:
    """The measured commit; $BENCHMARK_COMMIT overrides it, for a checkout without history.

    Cached: writing a result row by row over a tracked file would itself make the checkout dirty.
    """
    named = os.environ.get("BENCHMARK_COMMIT")
    if named:
        return named
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def cpu() -> dict[str, Any]:
    return {"cpu": _cpu_name(), "cores": os.cpu_count()}


def gpu() -> dict[str, Any]:
    """The first GPU, its driver, and the CPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    name, driver = (text.strip() for text in done.stdout.split(","))
    return {"gpu": name, "driver": f"driver {driver}", **cpu()}


def write(path: Path, benchmark: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write a result; `facts` precede the rows and override the detected ones.

    Paths in the checkout are written relative to it.
    """
    found = {
        "benchmark": benchmark,
        "machine": cpu(),
        "versions": {"python": platform.python_version()},
        "commit": commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**found, **facts, "rows": rows}, indent=1)
    path.write_text(text.replace(f'"{ROOT}/', '"') + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
