"""Shows a run on a terminal: progress while it runs, tables at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.cli.bench.serving import load
from inflight.cli.bench.serving.lag import WARN_ABOVE_MS
from inflight.cli.bench.serving.load import Limit
from inflight.cli.bench.serving.results.comparison import Difference
from inflight.cli.bench.serving.results.report import Level, Report, Summary, highest
from inflight.cli.bench.tables import Tables

Refresh = Callable[[load.Progress], None]

# Of 299 requests, the slowest is above the true 99th percentile in 95 of 100 samples (0.99^299 is
# 0.05). Of 1,000, the 98.4th and the 99.6th percentile enclose the true 99th in 95 of 100.
MIN_REQUESTS_FOR_P99 = 299
# In a shorter window, filling and draining the server weighs too much.
MIN_REQUESTS_IN_WINDOW = 3
TITLES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "gap": "gap",
    "tpot": "TPOT",
    "e2e": "e2e",
}


class Show:
    """Progress goes to standard error, results to standard output."""

    def __init__(self, progress: Console | None = None, results: Console | None = None) -> None:
        self._progress = progress or Console(stderr=True)
        self._tables = Tables(results)

    def note(self, text: str) -> None:
        self._progress.print(escape(text), highlight=False, soft_wrap=True)

    def warning(self, text: str) -> None:
        label = "[bold yellow]warning:[/] "
        self._progress.print(label + escape(text), highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def running(self, name: str, limit: Limit) -> Iterator[Refresh]:
        """A callback that shows how far a level is: a bar on a terminal, else one line."""
        if not self._progress.is_terminal:
            self.note(f"{name}: {_limit(limit)}")
            yield lambda progress: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self._progress, transient=True) as bars:
            task = bars.add_task(escape(name), total=1.0, figures="")

            def refresh(progress: load.Progress) -> None:
                rate = progress.num_tokens / max(progress.elapsed_s, 1e-9)
                bars.update(
                    task,
                    completed=_fraction(progress, limit),
                    figures=f"{progress.num_sent} sent, {progress.num_in_flight} in flight, "
                    f"{rate:,.0f} tok/s",
                )

            yield refresh

    def level(self, level: Level) -> None:
        """One line about a level that has ended, and warnings about it."""
        ttft, itl = (level.latency_ms.get(name) for name in ("ttft", "itl"))
        figures = [f"{level.throughput.output_tokens_per_s:,.1f} output tok/s"]
        if ttft and itl:
            figures.append(f"TTFT {ttft.p50:,.1f} ms, ITL {itl.p50:,.2f} ms (p50)")
        if level.num_failed:
            figures.append(f"{level.num_failed} failed")
        self.note(f"{level.name}: {level.num_completed} requests, {', '.join(figures)}")
        for text in warnings(level):
            self.warning(text)

    def report(self, report: Report) -> None:
        url = report.server.get("url") or report.server["endpoint"]
        self._tables.line(f"{report.server['model']} at {url}")
        self._tables.line("; ".join(f"{name} {text}" for name, text in report.workload.items()))
        rows = [row for level in report.levels for row in latency_rows(level)]
        self._tables.table("", [throughput_row(level) for level in report.levels], num_left=1)
        self._tables.line("")
        self._tables.table("latency in ms", rows)
        for text in conclusion(report):
            self._tables.line(text)

    def comparison(self, differences: Sequence[Difference]) -> None:
        self._tables.table("", [difference_row(one) for one in differences])


def conclusion(report: Report) -> list[str]:
    """Of an open loop with an SLO: the highest rate that meets it; at most one line."""
    if not report.slo or not any(level.kind == "rate" for level in report.levels):
        return []
    rule = f"p99 of {report.slo.replace(',', ' and ')} ms"
    best = highest(report.levels)
    if best is None:
        return [f"no rate meets {rule}"]
    return [
        f"highest rate that meets {rule}: {best.value:g}/s, with a goodput of "
        f"{best.goodput_per_s:,.2f}/s and {best.throughput.output_tokens_per_s:,.1f} output tok/s"
    ]


def warnings(level: Level) -> list[str]:
    """What makes the figures of a level doubtful."""
    client = level.client
    found = _steady_warnings(level) if level.ramp_s else []
    if client.lag_ms.p99 > WARN_ABOVE_MS:
        found.append(
            f"{level.name}: the load generator's event loop was late by {client.lag_ms.p99:.1f} ms "
            f"(p99) with {client.cpu_share:.0%} of a core, so latencies are too high by about as "
            "much; run it on another machine, or with less load"
        )
    late = client.num_late
    if client.late_ms is not None and client.late_ms.p99 > WARN_ABOVE_MS:
        found.append(
            f"{level.name}: requests were sent {client.late_ms.p99:.1f} ms late (p99), {late} of "
            f"{client.late_ms.count} by more than {WARN_ABOVE_MS:g} ms, so arrivals are less "
            "random than they should be; the wait is part of the latencies"
        )
    e2e = level.latency_ms.get("e2e")
    shortest_ms = 0 if level.ramp_s else level.window_s * 1e3 / MIN_REQUESTS_IN_WINDOW
    if shortest_ms and e2e is not None and e2e.p50 > shortest_ms:
        found.append(
            f"{level.name}: a request takes {e2e.p50 / 1e3:,.1f} s (p50) and the measured time is "
            f"only {level.window_s:,.1f} s, so filling and draining the server lower the rates; "
            "set a longer --duration or more --requests"
        )
    for kind, count in level.errors.items():
        example = level.error_examples.get(kind, "")
        hint = "; set --max-model-len" if "maximum context length" in example else ""
        found.append(f"{level.name}: {count} x {kind}: {example}{hint}")
    return found


def _steady_warnings(level: Level) -> list[str]:
    if level.num_requests >= MIN_REQUESTS_FOR_P99:
        return []
    return [
        f"{level.name}: {level.num_requests} measured requests are few for a 99th percentile; "
        f"with {MIN_REQUESTS_FOR_P99} and more, the largest latency is a bound on it (95 %)"
    ]


def throughput_row(level: Level) -> dict[str, str]:
    row = {
        "load": level.name + (" (interrupted)" if level.is_interrupted else ""),
        "requests": f"{level.num_completed:,}",
        "failed": f"{level.num_failed:,}" if level.num_failed else "",
        "req/s": f"{level.throughput.requests_per_s:,.2f}",
        "in tok/s": f"{level.throughput.input_tokens_per_s:,.1f}",
        "out tok/s": f"{level.throughput.output_tokens_per_s:,.1f}",
        "in/out": _lengths(level),
        "tok/response": f"{level.tokens_per_response:.2f}",
    }
    if level.goodput_per_s is not None and level.slo_share is not None:
        row["goodput/s"] = f"{level.goodput_per_s:,.2f}"
        row["in SLO"] = f"{level.slo_share:.1%}"
    if level.meets_slo is not None:
        row["p99 in SLO"] = "yes" if level.meets_slo else "no"
    if level.client.late_ms is not None:
        row["sent late"] = f"{level.client.num_late:,}"
    if level.cost is not None:
        row["cost/M out"] = f"{level.cost['output']:,.2f}"
        row["cost/M all"] = f"{level.cost['total']:,.2f}"
    has_lag = level.client.lag_ms.count > 0  # an engine in this process has no event loop
    return {**row, "lag ms": f"{level.client.lag_ms.p99:.1f}" if has_lag else ""}


def latency_rows(level: Level) -> list[dict[str, str]]:
    """One row for each metric of a level."""
    return [
        {"load": level.name, "metric": TITLES[name], **summary_cells(found)}
        for name, found in level.latency_ms.items()
    ]


def summary_cells(found: Summary) -> dict[str, str]:
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    return {name: f"{getattr(found, name):,.2f}" for name in names}


def difference_row(one: Difference) -> dict[str, str]:
    interval = "too few" if one.low is None else f"{one.low:+,.2f} to {one.high:+,.2f}"
    return {
        "load": one.load,
        "metric": one.metric,
        "before": f"{one.before:,.2f}",
        "after": f"{one.after:,.2f}",
        "difference": f"{one.delta:+,.2f}",
        "%": "" if one.share is None else f"{one.share:+.1%}",
        "95 % interval": interval,
        "verdict": one.verdict,
    }


def _lengths(level: Level) -> str:
    if level.input_tokens is None or level.output_tokens is None:
        return ""
    return f"{level.input_tokens.mean:,.0f}/{level.output_tokens.mean:,.0f}"


def _limit(limit: Limit) -> str:
    parts = []
    if limit.duration_s is not None:
        parts.append(f"{limit.duration_s:g} s")
    if limit.num_requests is not None:
        parts.append(f"{limit.num_requests} requests")
    return " or ".join(parts) + (f" after {limit.ramp_s:g} s" if limit.ramp_s else "")


def _fraction(progress: load.Progress, limit: Limit) -> float:
    found = 0.0
    if limit.duration_s is not None:
        found = progress.elapsed_s / (limit.ramp_s + limit.duration_s)
    if limit.num_requests is not None and not limit.ramp_s:
        ended = progress.num_sent - progress.num_in_flight
        found = max(found, ended / limit.num_requests)
    return min(1.0, found)
