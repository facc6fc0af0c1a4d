"""Decode attention of sequences with a common prefix, at the shape of an 8B Llama: 32 query heads,
8 KV heads of 128, bfloat16.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_cascade.py [--json rows.json]

Each case is timed with the prefix read once for all sequences (by: cascade), and by each of them
(by: inflight). The floor is the time of a copy of the bytes that must be read: the prefix once, and
each sequence's own keys and values. The plan is computed once per step and timed by itself. See
timing.py for the method.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timing
import torch
from bench_attention import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SPEC, Call

from inflight_kernels.ops.attention.attention import attend, workspace_size
from inflight_kernels.ops.attention.operands import AttentionMetadata, Cascade
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.ops.rope import PagedKV

BLOCK_SIZE = 16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize


@dataclass(frozen=True)
class Case:
    """Sequences, the tokens that all of them share, and those of each."""

    count: int
    shared: int
    own: int

    @property
    def num_bytes(self) -> int:
        return (self.shared + self.count * self.own) * TOKEN_BYTES


CASES = (
    Case(256, 2048, 192),
    Case(64, 8192, 128),
    Case(256, 0, 2240),
    Case(64, 0, 2240),
    Case(64, 2048, 192),
    Case(16, 2048, 512),
    Case(32, 512, 512),
)


class Inputs:
    """A decode step, with blocks in random order.

    Args:
        case: of its sequences.
        cascade: whether they share the prefix.
    """

    def __init__(self, case: Case, cascade: bool) -> None:
        count, length = case.count, case.shared + case.own
        shared, own = (
            case.shared // BLOCK_SIZE,
            -(-length // BLOCK_SIZE) - case.shared // BLOCK_SIZE,
        )
        num_blocks = shared + count * own
        order = torch.randperm(num_blocks, device="cuda").int()
        tables = torch.cat(
            (order[:shared].expand(count, shared), order[shared:].view(count, own)), 1
        )
        shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.kv = PagedKV(*(torch.randn(shape, device="cuda").to(DTYPE) for _ in "kv"))
        self.q = torch.randn(count, NUM_HEADS, HEAD_DIM, device="cuda").to(DTYPE)
        self.out = torch.empty_like(self.q)
        size = workspace_size(count, count, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 1)
        memory = Cascade.empty(count, BLOCK_SIZE, SPEC, self.q.device) if cascade else None
        self.metadata = AttentionMetadata(
            SPEC,
            torch.arange(count + 1, dtype=torch.int32, device="cuda"),
            torch.full((count,), length, dtype=torch.int32, device="cuda"),
            tables.contiguous(),
            count,
            torch.zeros(size, dtype=torch.uint8, device="cuda"),
            1,
            planned=True,
            cascade=memory,
        )
        plan(self.metadata)

    def run(self) -> None:
        """Attention of a layer."""
        attend(self.q, self.kv, self.metadata, self.out)


def rows() -> Iterator[dict[str, Any]]:
    ceiling = timing.copy_ceiling()
    yield ceiling
    for case in CASES:
        name = f"decode b{case.count} shared{case.shared} own{case.own}"
        floor = case.num_bytes / ceiling["tb_per_s"] * 1e-6
        for by in ("inflight", "cascade"):
            shares = by == "cascade"
            found = timing.measure(functools.partial(_attention, case, shares), case.num_bytes)
            row = found.row(case.num_bytes)
            yield {"op": name, "by": by, **row, "floor_us": round(floor, 2)}
            torch.cuda.empty_cache()
            planned = timing.measure(functools.partial(_plan, case, shares), case.num_bytes)
            yield {"op": f"plan of {name}", "by": by, **planned.row()}
            torch.cuda.empty_cache()
        yield {"op": name, "error": _error(case)}


def _attention(case: Case, cascade: bool) -> Call:
    return Inputs(case, cascade).run


def _plan(case: Case, cascade: bool) -> Call:
    return functools.partial(plan, Inputs(case, cascade).metadata)


def _error(case: Case) -> float:
    """Relative difference of the results with and without a shared prefix."""
    inputs = Inputs(case, True)
    inputs.run()
    shared = inputs.out.float()
    inputs.metadata = replace(inputs.metadata, cascade=None)
    plan(inputs.metadata)
    inputs.run()
    return float((inputs.out.float() - shared).norm() / shared.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    timing.report("attention of shared prefixes", rows(), options.json)


if __name__ == "__main__":
    main()
