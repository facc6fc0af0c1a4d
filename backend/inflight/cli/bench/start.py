"""Measures engine startup and its phases, in this process or in a new one.

python -m inflight.cli.bench.start SETTINGS     prints one JSON object when the engine is ready
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight import config as settings
from inflight.checkpoint.locate import locate
from inflight.cli.bench.rows import Row
from inflight.config import EngineConfig
from inflight.engine.engine import Engine, generate
from inflight.errors import EngineError
from inflight.execution import factory as runners


@dataclass(frozen=True, slots=True)
class Started:
    """An engine with the facts of its startup.

    Attributes:
        device: name of the GPU, or `cpu`.
        versions: of Python and torch.
        phases: phase -> seconds, in order; the first one is imports and settings.
        facts: blocks and memory.
    """

    engine: Engine
    device: str
    versions: dict[str, str]
    phases: dict[str, float]
    facts: dict[str, Any]


class Phases:
    """Measures the time between progress reports."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._current = "imports"
        self._since = time.perf_counter()

    def report(self, what: str, fraction: float) -> None:
        if what != self._current:
            self.end()
            self._current = what

    def end(self) -> None:
        now = time.perf_counter()
        before = self.seconds.get(self._current, 0.0)
        self.seconds[self._current] = before + now - self._since
        self._since = now

    def refine(self, timings: Mapping[str, float]) -> None:
        """Replace the times taken from progress reports by the runner's own timings."""
        if timings:
            rest = sum(self.seconds.values()) - sum(timings.values())
            self.seconds = {"imports": max(0.0, rest), **timings}


def build(config: EngineConfig) -> Started:
    """Build an engine in this process.

    Raises:
        ConfigError: see `factory.build`.
    """
    phases = Phases()
    checkpoint = locate(config.model)
    config, _ = runners.resolve_device(config, checkpoint)
    runner, model = runners.build(config, checkpoint, phases.report)
    phases.report("engine", 0.0)
    engine = Engine(config, runner, model.max_model_len(config), model.eos_token_ids)
    gc.collect()
    gc.freeze()  # as the engine's process does
    phases.end()
    # A runner's own timings may be finer than its progress reports.
    phases.refine(getattr(runner, "timings", {}))
    # Not earlier: `factory.build` sets the variables that OpenMP reads when torch is imported.
    import torch

    facts: dict[str, Any] = {
        "num_blocks": runner.num_blocks,
        "block_size": runner.block_size,
        "block_tokens": list(runner.kv_tables.spans),
    }
    device = "cpu"
    if config.device == "cuda":
        device = torch.cuda.get_device_name()
        free, total = torch.cuda.mem_get_info()
        facts["free_gib"] = round(free / 2**30, 2)
        facts["in_use"] = round(1 - free / total, 4)
    seconds = {what: round(value, 3) for what, value in phases.seconds.items()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Started(engine, device, versions, seconds, facts)


@dataclass(frozen=True, slots=True)
class Startup:
    """One startup in a new process; seconds since that process was started.

    Attributes:
        ready_s: the engine accepts requests.
        first_token_s: it has generated a token.
        phases: see `Started`; `interpreter` is the time before them.
    """

    ready_s: float
    first_token_s: float
    phases: dict[str, float]


def measure(raw: dict[str, Any]) -> dict[str, Startup]:
    """Start an engine twice, first with an empty kernel cache, then with a warm one.

    The page cache is not cleared: modules that this process has imported are read from memory.

    Args:
        raw: settings as in engine.json.

    Raises:
        EngineError: a start failed, with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as cache:
        return {name: _start(raw, Path(cache)) for name in ("cold", "warm")}


def _start(raw: dict[str, Any], cache: Path) -> Startup:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli.bench.start", json.dumps(raw)],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise EngineError(f"the engine did not start:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    phases = {"interpreter": round(found["began"] - started, 3), **found["phases"]}
    return Startup(
        ready_s=round(found["ready"] - started, 3),
        first_token_s=round(found["first_token"] - started, 3),
        phases=phases,
    )


def main(arguments: list[str]) -> None:
    # On Linux time.monotonic() counts from boot, the same for all processes.
    began = time.monotonic()
    started = build(settings.parse(json.loads(arguments[0]), "settings"))
    ready = time.monotonic()
    vocab_size = started.engine.runner.vocab_size
    generate(started.engine, Row("first token", 1, 8, 1).requests(vocab_size, first_id=1))
    first_token = time.monotonic()
    result = {"began": began, "ready": ready, "first_token": first_token}
    print(json.dumps({**result, "phases": started.phases}))


if __name__ == "__main__":
    main(sys.argv[1:])
