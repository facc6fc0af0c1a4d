"""Printing of results."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from inflight.cli.bench.engine import Report
from inflight.cli.bench.show import Show, cells
from inflight.cli.bench.trace import KernelTime, Profile, StepProfile

ROW: dict[str, Any] = {
    "row": "bs64",
    "workload": "64 x 16/500",
    "quant": "none",
    "metric": "out_tok_s",
    "out_tok_s": 12000.0,
    "ms_per_token": 5.333,
    "spread": 1.25,
    "seconds": [2.6, 2.7],
}
REPORT = Report(
    device="a GPU",
    versions={},
    settings={},
    start={"imports": 2.0, "recording graphs": 1.5},
    facts={"num_blocks": 50000, "block_size": 16, "free_gib": 6.5, "in_use": 0.953},
    rows=[ROW],
)


def shown(terminal: bool) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    Show(console).report(REPORT)
    return file.getvalue().splitlines()


def test_without_a_terminal_there_are_plain_aligned_lines():
    lines = shown(terminal=False)
    head, row = lines[-2:]
    assert " ".join(row.split()) == "bs64 64 x 16/500 none 12,000 out tok/s 5.333 1.2 %"
    assert head.index("workload") == row.index("64 x")
    assert not any("\x1b" in line for line in lines)


def test_the_engine_is_described():
    text = "\n".join(shown(terminal=False))
    assert "50,000 blocks of 16 tokens" in text
    assert "95.3% in use, 6.5 GiB free" in text
    assert "start: 3.50 s (imports 2.00, recording graphs 1.50)" in text


def test_on_a_terminal_there_is_a_table():
    assert any("│" in line and "12,000" in line for line in shown(terminal=True))


def test_columns_that_nothing_fills_are_left_out():
    file = io.StringIO()
    row = {name: ROW[name] for name in ("row", "workload", "quant", "metric", "out_tok_s")}
    report = Report("cpu", {}, {}, {}, {"num_blocks": 1, "block_size": 16}, [row])
    Show(Console(file=file, width=200)).report(report)
    assert "spread" not in file.getvalue()


def test_blocks_of_several_tables_differ_in_length():
    file = io.StringIO()
    facts = {"num_blocks": 70, "block_size": 16, "block_tokens": [80, 16]}
    Show(Console(file=file, width=200)).report(Report("cpu", {}, {}, {}, facts, [ROW]))
    assert "70 blocks of 80 or 16 tokens" in file.getvalue()


def test_a_caller_may_add_columns():
    file = io.StringIO()
    Show(Console(file=file, width=200)).report(REPORT, lambda row: {**cells(row), "note": "slow"})
    *_, head, row = file.getvalue().splitlines()
    assert head.split()[-1] == "note"
    assert row.split()[-1] == "slow"


def test_a_profile_shows_kernels_the_rest_and_the_gap():
    kernels = [KernelTime(f"kernel_{i}", "linear", 1, 10.0, 0.01) for i in range(30)]
    step = StepProfile("decode", 20, 1000.0, 700.0, kernels, untraced_us=900.0)
    file = io.StringIO()
    Show(Console(file=file, width=200)).profiles([Profile("bs1", "1 x 128/512", "a GPU", [step])])
    lines = file.getvalue().splitlines()
    assert lines[0] == "1 x 128/512, decode: 1000 us per step traced, 900 us untraced"
    assert lines[-2].split() == ["6", "more", "6", "60.0", "6.0%"]
    assert lines[-1].split() == ["no", "kernel", "runs", "gap", "700.0", "70.0%"]
