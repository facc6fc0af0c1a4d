"""Time to first token of a prompt, alone and while other sequences decode.

    python benchmarks/first_token.py [--launches] [--json FILE]

The engine runs in this process, with the shape of Llama-3.1-8B and random weights on a GPU, random
token ids, no prefix cache. `alone`: from the submission of a prompt to its first token. `among 32`:
the same while 32 sequences decode, and the longest gap between tokens of these sequences from the
submission to the first token. The prompt is submitted when a step has just begun, which is the
worst case: it waits for the whole step. Medians of 15 with minimum and maximum.

With --launches, steps are not captured as CUDA graphs, and each pays for its kernel launches. While
sequences decode, the host is then slower than the GPU, and a new prompt waits for no step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import result
from inflight.cli.bench import start
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine
from inflight.sampling.params import SamplingParams

SHAPE = result.ROOT / "benchmarks/models/llama-3.1-8b"
PROMPT_LENGTHS = (16, 32, 64, 100, 128, 200, 256, 384, 512, 1024, 2048)
NUM_OTHERS = 32
NUM_RUNS = 15
# Steps between two prompts.
PAUSE = 5


class Bench:
    """Times prompts on an engine, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._next_id = 1

    def submit(self, prompt_len: int, output_len: int) -> int:
        """Returns the request's id."""
        request_id = self._next_id
        self._next_id += 1
        prompt = self._random.integers(self._engine.runner.vocab_size, size=prompt_len).tolist()
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        self._engine.submit(Request(request_id, prompt, params))
        return request_id

    def step(self) -> set[int]:
        """Returns the ids of the requests that got tokens."""
        events = self._engine.step()
        for event in events:
            assert event.error is None, event.error
        return {event.request_id for event in events if event.token_ids}

    def begin_others(self, count: int) -> None:
        for _ in range(count):
            self.submit(16, 8000)
        waiting = count
        while waiting:
            waiting -= len(self.step())

    def first_token(self, prompt_len: int) -> tuple[float, float]:
        """Seconds until the prompt's first token, and the others' longest gap between tokens."""
        for _ in range(PAUSE):
            self.step()
        last = started = time.perf_counter()
        newcomer = self.submit(prompt_len, 1)
        gap = 0.0
        while True:
            came = self.step()
            now = time.perf_counter()
            if came:
                gap, last = max(gap, now - last), now
            if newcomer in came:
                return now - started, gap


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for name, count in (("alone", 0), (f"among {NUM_OTHERS}", NUM_OTHERS)):
        bench.begin_others(count)
        for prompt_len in PROMPT_LENGTHS:
            bench.first_token(prompt_len)
            times = [bench.first_token(prompt_len) for _ in range(NUM_RUNS)]
            found = {"row": name, "prompt": prompt_len, **milliseconds([a for a, _ in times])}
            if count:
                found["others_wait_ms"] = milliseconds([b for _, b in times])["median"]
            yield found


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return result.spread([value * 1e3 for value in seconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    config = EngineConfig(
        model=str(SHAPE),
        device="cuda",
        random_weights=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        cuda_graphs=not arguments.launches,
    )
    started = start.build(config)
    print(started.phases, started.facts, flush=True)
    found = []
    for row in rows(Bench(started.engine)):
        print(row, flush=True)
        found.append(row)
        if arguments.json is not None:  # each time, so that an interrupted run keeps its rows
            name = "first token, launches" if arguments.launches else "first token"
            versions = {"python": started.versions["python"], "torch": torch.__version__}
            result.write(arguments.json, name, found, machine=result.gpu(), versions=versions)


if __name__ == "__main__":
    main()
