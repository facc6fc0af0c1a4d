"""A mixture of experts with evenly spread and with skewed routing, random weights.

    python benchmarks/routing.py MODEL [--rows ROWS] [--result FILE] [--set NAME=VALUE ...]

Skewed routing follows Zipf's law: expert n, counted from 1, has a bias of -log(n) on its logit. Both
engines run in one process each, one after the other. `busiest` is the share of all rows of the last
layer's experts that the busiest one had in the last step, `distinct` how many experts had any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import result
from inflight.cli.bench import engine as bench
from inflight.cli.bench.rows import select
from inflight.models import decoder_cuda
from inflight.models.layers.experts import CudaMoe
from inflight.models.spec import MoeSpec

KINDS = ("spread", "zipf")


def measure(kind: str, model: str, rows: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an engine with this routing."""
    made: list[CudaMoe] = []

    def mixture(spec: MoeSpec, router: Any, bias: Any, *others: Any) -> CudaMoe:
        if kind == "zipf":
            bias = -torch.arange(1, spec.num_experts + 1, device=router.device).float().log()
        made.append(CudaMoe(spec, router, bias, *others))
        return made[-1]

    decoder_cuda.CudaMoe = mixture  # type: ignore[assignment, misc]
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
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        changes = dict(one.split("=", 1) for one in args.set)
        print(json.dumps(measure(args.kind, args.model, args.rows, changes)))
        return
    rows = []
    for kind in KINDS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--kind", kind], stdout=subprocess.PIPE, check=True
        )
        rows += json.loads(done.stdout.splitlines()[-1])
        for row in rows[-1:]:
            print(json.dumps(row), flush=True)
    if args.result is not None:
        result.write(args.result, "routing", rows, machine={"gpu": torch.cuda.get_device_name()})


if __name__ == "__main__":
    main()
