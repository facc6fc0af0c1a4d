"""Prints results: tables on a terminal, otherwise plain lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from inflight.cli.bench.engine import Report
from inflight.cli.bench.tables import Tables, number
from inflight.cli.bench.trace import GAP, Profile, StepProfile

AsCells = Callable[[Mapping[str, Any]], Mapping[str, str]]

_MAX_KERNELS = 24
_UNITS = {"out_tok_s": "out tok/s", "prompt_tok_s": "prompt tok/s", "ready_s": "s to ready"}


class Show:
    """Writes reports; by default to standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self._tables = Tables(console)

    def report(self, report: Report, as_cells: AsCells | None = None) -> None:
        """
        Args:
            as_cells: formats a row of the report; by default `cells`.
        """
        self._tables.line(f"device: {report.device}")
        for line in facts(report.facts, report.start):
            self._tables.line(line)
        if report.rows:
            self._tables.table("", [(as_cells or cells)(row) for row in report.rows])

    def profiles(self, profiles: Sequence[Profile]) -> None:
        for profile in profiles:
            for step in profile.steps:
                self._step(f"{profile.workload}, {step.kind}", step)

    def _step(self, name: str, step: StepProfile) -> None:
        title = f"{name}: {step.step_us:.0f} us per step traced, {step.untraced_us:.0f} us untraced"
        rows = [
            {
                "kernel": kernel.name,
                "group": kernel.group,
                "calls": f"{kernel.calls:g}",
                "us": f"{kernel.us:.1f}",
                "share": f"{kernel.share:.1%}",
            }
            for kernel in step.kernels[:_MAX_KERNELS]
        ]
        rest = step.kernels[_MAX_KERNELS:]
        if rest:
            share = sum(kernel.share for kernel in rest)
            rows.append(
                {
                    "kernel": f"{len(rest)} more",
                    "calls": f"{sum(kernel.calls for kernel in rest):g}",
                    "us": f"{sum(kernel.us for kernel in rest):.1f}",
                    "share": f"{share:.1%}",
                }
            )
        share = step.gap_us / step.step_us
        gap = {"kernel": "no kernel runs", "group": GAP}
        rows.append(gap | {"us": f"{step.gap_us:.1f}", "share": f"{share:.1%}"})
        self._tables.table(title, rows)


def facts(found: Mapping[str, Any], start: Mapping[str, float]) -> list[str]:
    """The engine's facts, one line each."""
    # By block table; older results have one for all.
    tokens = " or ".join(map(str, found.get("block_tokens", [found["block_size"]])))
    lines = [f"KV cache: {found['num_blocks']:,} blocks of {tokens} tokens"]
    if "in_use" in found:
        lines.append(f"GPU memory: {found['in_use']:.1%} in use, {found['free_gib']} GiB free")
    phases = ", ".join(f"{what} {seconds:.2f}" for what, seconds in start.items())
    return [*lines, f"start: {sum(start.values()):.2f} s ({phases})"]


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of a report as table cells; unknown values are ""."""
    metric = row["metric"]
    return {
        "row": row["row"],
        "workload": row["workload"],
        "quant": row["quant"],
        "value": number(row[metric]),
        "unit": _UNITS[metric],
        "ms/token": f"{row['ms_per_token']:.3f}" if "ms_per_token" in row else "",
        "spread": f"{row['spread']:.1f} %" if "spread" in row else "",
    }
