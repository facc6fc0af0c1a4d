"""Prints results: tables on a terminal, otherwise plain lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from inflight.cli.bench.engine import Report
from inflight.cli.bench.trace import GAP, Profile, StepProfile

AsCells = Callable[[Mapping[str, Any]], Mapping[str, str]]

_MAX_KERNELS = 24
_UNITS = {"out_tok_s": "out tok/s", "prompt_tok_s": "prompt tok/s", "ready_s": "s to ready"}


class Show:
    """Writes reports; by default to standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def report(self, report: Report, as_cells: AsCells | None = None) -> None:
        """
        Args:
            as_cells: formats a row of the report; by default `cells`.
        """
        self._line(f"device: {report.device}")
        for line in facts(report.facts, report.start):
            self._line(line)
        if report.rows:
            self._table("", [(as_cells or cells)(row) for row in report.rows])

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
        self._table(title, rows)

    def _table(self, title: str, rows: Sequence[Mapping[str, str]]) -> None:
        columns = list(dict.fromkeys(name for row in rows for name, text in row.items() if text))
        if not self._console.is_terminal:
            if title:
                self._line(title)
            for line in _aligned(columns, rows):
                self._line(line)
            return
        table = Table(title=title or None, title_justify="left")
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row.get(name, "") for name in columns))
        self._console.print(table)

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def facts(found: Mapping[str, Any], start: Mapping[str, float]) -> list[str]:
    """The engine's facts, one line each."""
    lines = [f"KV cache: {found['num_blocks']:,} blocks of {found['block_size']} tokens"]
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


def number(value: float) -> str:
    """A number with thousands separators, and one decimal if below 1000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _aligned(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [list(columns), *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return [
        "  ".join(
            text.ljust(width) if index < 2 else text.rjust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
