"""A mixture of experts with evenly spread and with skewed routing, random weights.

    python benchmarks/routing.py MODEL [--rows ROWS] [--kinds KIND ...] [--result FILE]
        [--set NAME=VALUE ...]

Of random weights, hidden states have so much in common that some experts are chosen far more often
than others. So the logits of routers are computed, and then replaced with a table's: `even` has
normal ones, independent of each other; `zipf` subtracts log(n) from those of expert n, counted from
1. `drawn` has those of the random weights. The replacement is one more launch in each layer. Each
kind runs in a process of its own. Of the last layer in the last step, `busiest` is the share of all
rows of experts that the busiest one had, and `distinct` how many experts had any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import result
from inflight.cli.bench import engine as bench
from inflight.cli.bench.rows import select
from inflight.models import decoder_cuda, experts_cuda
from inflight.models.experts_cuda import CudaMoe
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight_kernels.ops.linear.operands import Input

KINDS = ("even", "zipf", "drawn")


class TableRouter(CudaLinear):
    """A router's weight, whose logits are then replaced."""

    def __init__(self, kind: str, weight: Tensor, *args: Any) -> None:
        super().__init__(weight, *args)
        shape = bench.MAX_NUM_BATCHED_TOKENS, len(weight)
        self._table = torch.randn(shape, device=weight.device)
        if kind == "zipf":
            self._table -= torch.arange(1, len(weight) + 1, device=weight.device).log()
        self._table.neg_()

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        super().product(x, out, num_tokens)
        if not out.is_meta:  # a copy would be a node of another kind in a graph
            torch.neg(self._table[:num_tokens], out=out[:num_tokens])


def measure(kind: str, model: str, rows: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an engine with this routing."""
    made: list[CudaMoe] = []

    def mixture(*args: Any) -> CudaMoe:
        made.append(CudaMoe(*args))
        return made[-1]

    decoder_cuda.CudaMoe = mixture  # type: ignore[assignment, misc]
    if kind != "drawn":
        experts_cuda.CudaLinear = partial(TableRouter, kind)  # type: ignore[assignment, misc]
    chosen, _ = select(rows)
    settings = bench.engine_settings(model, "cuda", chosen, changes)
    found = []

    def on_row(report: bench.Report) -> None:
        routed = made[-1].routed
        num_tokens = chosen[len(report.rows) - 1].num_requests
        counts = routed.experts[: num_tokens * routed.top_k]
        of_each = counts.bincount(minlength=routed.num_experts)
        found.append(
            {
                "routing": kind,
                **report.rows[-1],
                "busiest": round(float(of_each.max() / of_each.sum()), 4),
                "distinct": int((of_each > 0).sum()),
            }
        )

    bench.run(settings, chosen, num_runs=1, on_row=on_row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", default="chat256")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        changes = dict(one.split("=", 1) for one in args.set)
        print(json.dumps(measure(args.only, args.model, args.rows, changes)))
        return
    rows = []
    for kind in args.kinds:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--only", kind], stdout=subprocess.PIPE, check=True
        )
        for row in json.loads(done.stdout.splitlines()[-1]):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if args.result is not None:
        result.write(args.result, "routing", rows, machine={"gpu": torch.cuda.get_device_name()})


if __name__ == "__main__":
    main()
