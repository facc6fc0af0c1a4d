"""What a run prints."""

from __future__ import annotations

import io

from rich.console import Console

from bench_reports import measured, random_level, record, report, steady_level
from inflight.cli.bench.serving.load import Limit, Progress
from inflight.cli.bench.serving.results.comparison import compare
from inflight.cli.bench.serving.results.figures import level
from inflight.cli.bench.serving.results.slo import parse
from inflight.cli.bench.serving.show import Show, warnings


def show(is_terminal: bool = False) -> tuple[Show, io.StringIO, io.StringIO]:
    """With what it writes to standard error and standard output."""
    files = io.StringIO(), io.StringIO()
    consoles = [Console(file=one, force_terminal=is_terminal, width=250) for one in files]
    return Show(*consoles), *files


def test_a_level_is_a_row_of_throughput_and_its_metrics_are_rows_of_latency() -> None:
    shown, _, results = show()
    slo = parse("ttft=50")
    shown.report(report(*(random_level(value, 0.01, slo=slo) for value in (1, 4))))
    lines = results.getvalue().splitlines()
    assert lines[0] == "generate at 127.0.0.1:8001"
    (head,) = [line for line in lines if line.startswith("load") and "goodput/s" in line]
    assert "cost/M out" in head
    rows = [line for line in lines if line.startswith("concurrency 4")]
    assert len(rows) == 6  # one of throughput, five of latency
    assert [row.split()[2] for row in rows[1:]] == ["TTFT", "ITL", "gap", "TPOT", "e2e"]
    assert [
        line for line in lines if line.split()[2:] == ["mean", "p50", "p90", "p95", "p99", "max"]
    ]
    assert "\x1b" not in results.getvalue()


def test_the_highest_rate_that_meets_the_slo_is_named() -> None:
    slo = parse("ttft=500,tpot=30")
    levels = [steady_level(rate, ttft_s, slo) for rate, ttft_s in ((2, 0.1), (8, 0.6), (4, 0.4))]
    shown, _, results = show()
    shown.report(report(*levels, slo=str(slo)))
    text = results.getvalue()
    assert text.splitlines()[-1] == (
        "highest rate that meets p99 of ttft=500 and tpot=30 ms: 4/s, with a goodput of 4.00/s "
        "and 8.0 output tok/s"
    )
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("rate ")}
    assert len(rows) == 3
    (head,) = [line for line in text.splitlines() if "p99 in SLO" in line]
    assert "sent late" in head
    shown, _, results = show()
    shown.report(report(levels[1], slo=str(slo)))
    assert results.getvalue().splitlines()[-1] == "no rate meets p99 of ttft=500 and tpot=30 ms"


def test_few_requests_for_a_99th_percentile_are_a_warning() -> None:
    slo = parse("ttft=500")
    (text,) = warnings(steady_level(4, 0.1, slo, num_requests=298))
    assert "298 measured requests are few for a 99th percentile; with 299 and more" in text
    assert warnings(steady_level(4, 0.1, slo, num_requests=299)) == []


def test_a_late_event_loop_is_a_warning() -> None:
    for lag_ms, is_warned in ((4.9, False), (5.1, True)):
        shown, progress, _ = show()
        shown.level(level("rate", 2, measured(record(0.0, (0.1, 1)), lag_ms=lag_ms), None, None))
        assert ("warning: rate 2/s: the load generator's event loop" in progress.getvalue()) == (
            is_warned
        )


def test_a_window_of_few_requests_is_a_warning() -> None:
    for window_s, is_warned in ((2.9, True), (3.1, False)):
        shown, progress, _ = show()
        run = measured(record(0.0, (0.5, 1), (1.0, 1)), window_s=window_s)
        shown.level(level("concurrency", 1, run, None, None))
        assert ("a request takes 1.0 s (p50)" in progress.getvalue()) == is_warned


def test_errors_are_shown_with_an_example() -> None:
    shown, progress, _ = show()
    records = [record(0.0, error="Unavailable"), record(0.0, (0.5, 1), (0.6, 1))]
    shown.level(level("rate", 2, measured(*records), None, None))
    text = progress.getvalue()
    assert "rate 2/s: 1 requests" in text and "1 failed" in text
    assert "warning: rate 2/s: 1 x Unavailable: what Unavailable says" in text


def test_a_prompt_beyond_the_context_gets_a_hint() -> None:
    run = measured(record(0.0, error="InvalidRequest"))
    run.examples["InvalidRequest"] = "This model's maximum context length is 8 tokens."
    (text,) = warnings(level("rate", 2, run, None, None))
    assert text.endswith("is 8 tokens.; set --max-model-len")


def test_progress_is_a_bar_on_a_terminal_and_a_line_elsewhere() -> None:
    found = {}
    for is_terminal in (False, True):
        shown, progress, _ = show(is_terminal)
        with shown.running("concurrency 4", Limit(100, 30.0)) as refresh:
            refresh(Progress(num_sent=54, num_in_flight=4, num_tokens=900, elapsed_s=3.0))
        found[is_terminal] = progress.getvalue()
    assert found[False] == "concurrency 4: 30 s or 100 requests\n"
    assert "54 sent, 4 in flight, 300 tok/s" in found[True]


def test_a_comparison_is_a_table_of_differences() -> None:
    shown, _, results = show()
    before, after = (report(random_level(4, itl)) for itl in (0.01, 0.02))
    shown.comparison(compare(before, after))
    (row,) = [line for line in results.getvalue().splitlines() if "tpot ms" in line]
    assert "+100.0%" in row and row.endswith("worse") and " to " in row
