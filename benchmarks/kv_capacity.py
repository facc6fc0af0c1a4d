"""How many sequences a KV cache holds, with and without freed windows.

    python benchmarks/kv_capacity.py [--shape gemma-3-12b] [--tokens 8192] [--json FILE]

A pool of the given bytes is filled with requests by the engine's own scheduler and block tables, on
the device `echo`, which computes nothing: prompts of --tokens less 512, each with 512 tokens of
output. Counted are the sequences that decode at the same time. By default the pool is that of one
H200, as an engine with that shape reported it (results/engine-h200-SHAPE.json).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import result
from inflight.checkpoint.locate import locate
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine
from inflight.execution.echo_runner import EchoRunner
from inflight.kv.layout import KVLayout, KVTables
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams

HERE = Path(__file__).resolve().parent
NUM_OUTPUT = 512
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """A pool of KV blocks.

    Attributes:
        layout: keys and values of the model, as the engine allocates them.
        num_blocks: of the pool.
        block_size: tokens of a kernel block.
    """

    layout: KVLayout
    num_blocks: int
    block_size: int

    @property
    def tables(self) -> KVTables:
        return KVTables(self.layout.tables, self.block_size)

    @property
    def bytes_per_token(self) -> int:
        """Of a token in all layers, if none of them frees it."""
        return replace(self.layout, frees_windows=False).block_bytes(1)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes(self.block_size)

    @property
    def frees_windows(self) -> bool:
        return self.tables.frees_windows

    def without_freed_windows(self) -> KVCapacity:
        """The same memory for blocks that are all kept."""
        layout = replace(self.layout, frees_windows=False)
        num_blocks = self.pool_bytes // layout.block_bytes(self.block_size)
        return KVCapacity(layout, num_blocks, self.block_size)

    def sequences(self, num_tokens: int) -> int:
        """Sequences of so many tokens (see `KVTables.max_sequences`)."""
        return self.tables.max_sequences(self.num_blocks, num_tokens)

    def report(self, num_tokens: int) -> dict[str, Any]:
        """Fields of a result."""
        found: dict[str, Any] = {
            "bytes_per_token": self.bytes_per_token,
            "sequence_tokens": num_tokens,
            "sequences": self.sequences(num_tokens),
        }
        if self.frees_windows:
            kept = self.without_freed_windows().sequences(num_tokens)
            found["sequences_without_freed_windows"] = kept
        return found

    def line(self, num_tokens: int) -> str:
        """The same in words."""
        text = (
            f"KV cache: {self.sequences(num_tokens):,} sequences of {num_tokens:,} tokens, "
            f"{self.bytes_per_token:,} bytes per token"
        )
        if self.frees_windows:
            kept = self.without_freed_windows().sequences(num_tokens)
            text += f"; {kept:,} without freed windows"
        return text


def measure(spec: ModelSpec, kv: KVCapacity, num_tokens: int) -> dict[str, Any]:
    """Fill a pool and count the sequences that decode at the same time."""
    config = EngineConfig(
        model=".",
        device="echo",
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=num_tokens,
        enable_prefix_caching=False,
        max_model_len=num_tokens,
    )
    runner = EchoRunner(config, spec)
    runner.kv_tables = kv.tables
    engine = Engine(config, runner, num_tokens, eos_token_ids=())
    params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
    num_prompt = num_tokens - NUM_OUTPUT
    num_requests = min(MAX_NUM_SEQS, 2 * kv.sequences(num_tokens) + 2)
    for index in range(num_requests):
        prompt = [(index + position) % 1000 for position in range(num_prompt)]
        engine.submit(Request(index, prompt, params))
    most, num_blocks_used = 0, 0
    while engine.has_work:
        engine.step()
        running = [one for group in engine.scheduler.running for one in group.members]
        num_decoding = sum(one.num_computed >= num_prompt for one in running)
        if num_decoding > most:
            most = num_decoding
            num_blocks_used = kv.num_blocks - engine.scheduler.num_free_blocks
    return {
        "frees_windows": kv.frees_windows,
        "num_blocks": kv.num_blocks,
        "tokens": f"{num_prompt} to {num_tokens}",
        "requests": num_requests,
        "sequences": most,
        "sequences_by_arithmetic": kv.sequences(num_tokens),
        "blocks_in_use": num_blocks_used,
        "preemptions": engine.scheduler.num_preemptions,
    }


def _measured_pool(spec: ModelSpec, path: Path) -> KVCapacity:
    """The pool of an engine that was measured, with windows freed."""
    measured = json.loads(path.read_text())
    num_blocks, block_size = (measured["facts"][key] for key in ("num_blocks", "block_size"))
    layout = spec.kv_layout("bfloat16", frees_windows=True)
    if "sequences_without_freed_windows" in measured["kv_cache"]:
        return KVCapacity(layout, num_blocks, block_size)
    pool_bytes = num_blocks * replace(layout, frees_windows=False).block_bytes(block_size)
    return KVCapacity(layout, pool_bytes // layout.block_bytes(block_size), block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="gemma-3-12b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = read_spec(locate(str(HERE / "models" / args.shape)))
    freeing = _measured_pool(spec, HERE / f"results/engine-h200-{args.shape}.json")
    rows = []
    for kv in (freeing, freeing.without_freed_windows()):
        rows.append(measure(spec, kv, args.tokens))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
    if args.json is not None:
        context = {"shape": args.shape, "pool_gib": round(freeing.pool_bytes / 2**30, 2)}
        result.write(args.json, "kv capacity", rows, **context)


if __name__ == "__main__":
    main()
