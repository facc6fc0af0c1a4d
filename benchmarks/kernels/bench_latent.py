"""Latent attention (MLA) at the shape of DeepSeek V2 Lite: 16 query heads, a latent rank of 512, 64
rotated columns, heads of 128 before and after; bfloat16.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_latent.py [--json rows.json]
        [--heads 16] [--only decode prefill products layer]

For decode, the rows report the bandwidth over the bytes of keys, and its share of a copy's; for
prefill, the throughput of the causal products in absorbed form. The plan is computed once per step
and therefore timed separately. `layer` is the chain of a layer's kernels from the projections to
the values, with programmatic dependent launch. `floor_us` is the time to read and write each
operand once at the bandwidth of a large copy, or to multiply at the rate of a large GEMM, whichever
is longer. `cublas_us` is the time of torch.bmm for the same product. See timing.py for the method.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timing
import torch
from torch import Tensor

from inflight_kernels.ops.latent.attention import (
    LatentMetadata,
    LatentParams,
    attend,
    plan,
    workspace_size,
)
from inflight_kernels.ops.latent.operands import (
    DTYPE,
    KEY,
    RANK,
    ROTATED,
    LatentNorm,
    Projections,
)
from inflight_kernels.ops.latent.products import absorb, prepare, project_values
from inflight_kernels.ops.latent.rows import write_latent
from inflight_kernels.ops.rope import RopeInputs
from inflight_kernels.torch_ops.transformer import rotary_tables

NOPE, VALUE = 128, 128
BLOCK_SIZE = 64
POSITIONS = 32768
SCALE = (NOPE + ROTATED) ** -0.5

# Number of sequences, and their length.
DECODE = ((1, 4096), (1, 32768), (16, 8192), (64, 1024), (64, 4096), (256, 1024))
# Number of sequences, new tokens of each, and their length.
PREFILL = ((8, 1024, 1024), (1, 4096, 4096), (1, 2048, 16384), (64, 4, 4096))
TOKENS = (1, 64, 256, 8192)
PARTS = ("decode", "prefill", "products", "layer")

Call = Callable[[], object]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


@functools.cache
def _angles() -> tuple[Tensor, Tensor]:
    """cos and sin."""
    frequencies = (1e4 ** -(np.arange(0, ROTATED, 2) / ROTATED)).astype(np.float32)
    cos, sin = rotary_tables(frequencies, POSITIONS)
    return cos.cuda(), sin.cuda()


class Step:
    """New tokens of sequences of equal lengths, whose blocks are in random order."""

    def __init__(self, count: int, q_len: int, kv_len: int, heads: int) -> None:
        blocks = -(-kv_len // BLOCK_SIZE)
        tokens = count * q_len
        self.cache = _random(count * blocks, BLOCK_SIZE, 1, KEY)
        self.tables = torch.randperm(count * blocks, device="cuda").int().view(count, blocks)
        self.queries = _random(tokens, heads, KEY)
        self.out = torch.empty(tokens, heads, RANK, dtype=DTYPE, device="cuda")
        size = workspace_size(count, tokens, heads, q_len)
        self.metadata = LatentMetadata(
            LatentParams(heads, SCALE),
            torch.arange(0, tokens + 1, q_len, dtype=torch.int32, device="cuda"),
            torch.full((count,), kv_len, dtype=torch.int32, device="cuda"),
            self.tables,
            tokens,
            torch.zeros(size, dtype=torch.uint8, device="cuda"),
            q_len,
            planned=True,
        )
        plan(self.metadata)

    def attend(self, history_ready: bool = False) -> None:
        attend(
            self.queries,
            self.cache,
            self.metadata,
            self.out,
            history_ready=history_ready,
            pdl=True,
        )


class Layer:
    """Operands of the kernels around attention; the cache has room for the tokens."""

    def __init__(self, tokens: int, heads: int, slots: Tensor | None = None) -> None:
        columns = heads * (NOPE + ROTATED)
        both = _random(tokens, columns + KEY)
        self.projections = Projections(
            both[:, :columns].view(tokens, heads, NOPE + ROTATED), both[:, columns:]
        )
        self.norm = LatentNorm(torch.ones(RANK, device="cuda"))
        positions = torch.randint(0, POSITIONS, (tokens,), device="cuda")
        if slots is None:
            slots = torch.randperm(tokens, device="cuda")
        self.rope = RopeInputs(positions, slots, *_angles())
        blocks = -(-tokens // BLOCK_SIZE)
        self.cache = torch.empty(blocks, BLOCK_SIZE, 1, KEY, dtype=DTYPE, device="cuda")
        self.queries = torch.empty(tokens, heads, KEY, dtype=DTYPE, device="cuda")
        self.attended = _random(tokens, heads, RANK)
        self.out = torch.empty(tokens, heads, VALUE, dtype=DTYPE, device="cuda")
        self.k_up, self.v_up = _random(heads, NOPE, RANK), _random(heads, VALUE, RANK)

    def write_latent(self) -> None:
        projections, queries = self.projections, self.queries
        write_latent(projections, self.norm, self.rope, self.cache, queries=queries, pdl=True)

    def absorb(self) -> None:
        """With our kernel, whatever the number of tokens."""
        q, queries = self.projections.q, self.queries
        absorb(q, self.k_up, queries=queries, batch_invariant=True, pdl=True)

    def project_values(self) -> None:
        """With our kernel, whatever the number of tokens."""
        project_values(self.attended, self.v_up, out=self.out, batch_invariant=True, pdl=True)

    def prepare(self) -> None:
        self.prepare_in(self.cache, self.queries)

    def prepare_in(self, cache: Tensor, queries: Tensor, history_ready: bool = False) -> None:
        prepare(
            self.projections,
            self.k_up,
            self.norm,
            self.rope,
            cache,
            queries=queries,
            history_ready=history_ready,
        )

    def absorb_by_cublas(self) -> None:
        by_head = self.queries[:, :, :RANK].transpose(0, 1)
        torch.bmm(self.projections.q[:, :, :NOPE].transpose(0, 1), self.k_up, out=by_head)

    def project_by_cublas(self) -> None:
        by_head, out = self.attended.transpose(0, 1), self.out.transpose(0, 1)
        torch.bmm(by_head, self.v_up.transpose(1, 2), out=out)


def decode(heads: int, copy: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for count, kv_len in DECODE:
        num_bytes = count * kv_len * KEY * DTYPE.itemsize

        def make(count: int = count, kv_len: int = kv_len) -> Call:
            return Step(count, 1, kv_len, heads).attend

        found = timing.measure(make, num_bytes)
        yield {
            "op": f"decode b{count} ctx{kv_len}",
            "heads": heads,
            **found.row(num_bytes),
            **_beside(found.median, num_bytes / copy["tb_per_s"] * 1e-6),
        }
        step = Step(count, 1, kv_len, heads)
        found = timing.measure(lambda step=step: lambda: plan(step.metadata), num_bytes)
        yield {"op": f"plan of decode b{count} ctx{kv_len}", "heads": heads, **found.row()}
        torch.cuda.empty_cache()


def prefill(heads: int) -> Iterator[dict[str, Any]]:
    for count, q_len, kv_len in PREFILL:
        pairs = count * sum(range(kv_len - q_len + 1, kv_len + 1))
        num_bytes = count * (kv_len * KEY + q_len * heads * (KEY + RANK)) * DTYPE.itemsize

        def make(count: int = count, q_len: int = q_len, kv_len: int = kv_len) -> Call:
            return Step(count, q_len, kv_len, heads).attend

        found = timing.measure(make, num_bytes)
        yield {
            "op": f"chunks {count} x {q_len} of {kv_len}",
            "heads": heads,
            **found.row(flops=2 * pairs * heads * (KEY + RANK)),
        }
        torch.cuda.empty_cache()


def products(heads: int, copy: dict[str, Any], gemm: dict[str, Any]) -> Iterator[dict[str, Any]]:
    weight = heads * NOPE * RANK
    for tokens in TOKENS:
        rows = tokens * heads
        product = {"bytes": weight + rows * (NOPE + RANK), "flops": 2 * rows * NOPE * RANK}
        written = 2 * tokens * KEY + 2 * rows * ROTATED
        both = {**product, "bytes": product["bytes"] + written}
        sizes = {
            "absorb": (product, "absorb_by_cublas"),
            "project_values": (product, "project_by_cublas"),
            "write_latent": ({"bytes": written, "flops": 0}, ""),
            "prepare": (both, ""),
        }
        for op, (size, peer) in sizes.items():
            num_bytes = size["bytes"] * DTYPE.itemsize

            def make(op: str = op, tokens: int = tokens) -> Call:
                call: Call = getattr(Layer(tokens, heads), op)
                return call

            found = timing.measure(make, num_bytes)
            floor = max(
                num_bytes / copy["tb_per_s"] * 1e-6, size["flops"] / gemm["tflop_per_s"] * 1e-6
            )
            row = {"op": op, "heads": heads, "tokens": tokens, **found.row(num_bytes)}
            row |= _beside(found.median, floor)
            if peer:
                theirs = timing.measure(lambda peer=peer, make=make: make(peer), num_bytes)
                row["cublas_us"] = round(theirs.median, 2)
            yield row
            torch.cuda.empty_cache()


def layers(heads: int, copy: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chain of a layer with its history ready, as in all layers of a step but the first."""
    for count, kv_len in DECODE:
        num_bytes = count * kv_len * KEY * DTYPE.itemsize
        num_bytes += heads * (NOPE + VALUE) * RANK * DTYPE.itemsize

        def make(count: int = count, kv_len: int = kv_len) -> Call:
            step = Step(count, 1, kv_len, heads)
            last = kv_len - 1
            slots = step.tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
            layer = Layer(count, heads, slots)

            def run() -> None:
                layer.prepare_in(step.cache, step.queries, history_ready=True)
                step.attend(history_ready=True)
                project_values(step.out, layer.v_up, out=layer.out, pdl=True)

            return run

        found = timing.measure(make, num_bytes)
        yield {
            "op": f"layer b{count} ctx{kv_len}",
            "heads": heads,
            **found.row(num_bytes),
            **_beside(found.median, num_bytes / copy["tb_per_s"] * 1e-6),
        }
        torch.cuda.empty_cache()


def _beside(us: float, floor: float) -> dict[str, float]:
    return {"floor_us": round(floor, 2), "share": round(floor / us, 3)}


def rows(heads: int, only: list[str]) -> Iterator[dict[str, Any]]:
    copy, gemm = timing.copy_ceiling(), timing.gemm_ceiling()
    yield copy
    yield gemm
    if "decode" in only:
        yield from decode(heads, copy)
    if "layer" in only:
        yield from layers(heads, copy)
    if "products" in only:
        yield from products(heads, copy, gemm)
    if "prefill" in only:
        yield from prefill(heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--heads", type=int, default=16, help="query heads; default: 16")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.manual_seed(0)
    timing.report("latent attention", rows(options.heads, options.only), options.json)


if __name__ == "__main__":
    main()
