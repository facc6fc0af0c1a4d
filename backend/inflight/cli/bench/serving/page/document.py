"""The pages: one of a run, one of the comparison of two. Each is a single file without a script;
nothing in it is fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from inflight.cli.bench.serving.page import chart, charts
from inflight.cli.bench.serving.page.chart import Chart
from inflight.cli.bench.serving.results import slo as slo_
from inflight.cli.bench.serving.results.comparison import Difference
from inflight.cli.bench.serving.results.report import Report
from inflight.cli.bench.serving.show import (
    conclusion,
    difference_row,
    latency_rows,
    throughput_row,
    warnings,
)

_STYLE = (
    """
:root { color-scheme: light dark; --text: #1a1a1a; --muted: #595959; --line: #d9d9d9;
  --page: #ffffff; --warn: #a33c00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ededed; --muted: #a6a6a6; --line: #404040; --page: #161616; --warn: #ff9f66; }
}
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child, .two td:nth-child(2), .two th:nth-child(2) { text-align: left; }
.wide { overflow-x: auto; } .charts { margin-top: 1.5rem;
  display: flex; flex-wrap: wrap; gap: 1.5rem; }
svg { max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
code { font-size: .9em; } .warning { color: var(--warn); } .note { color: var(--muted); }
"""
    + chart.STYLE
)

_METHOD = (
    "Several tokens may arrive in one response. TTFT ends with the first response that has a "
    "token. A response with k tokens after a gap g counts as k intervals of g / k in ITL; `gap` is "
    "the undivided time between responses. TPOT is the time after the first response, divided by "
    "the tokens after it. Percentiles are interpolated linearly. Rates are over the measured "
    "window: the given duration, or the time up to the last response. Latencies of an open loop "
    "count from the time at which a request was due."
)


def of_run(report: Report) -> str:
    """
    Returns:
        A page of HTML.
    """
    facts = {
        "server": ", ".join(f"{name} {text}" for name, text in report.server.items()),
        "workload": ", ".join(f"{name}: {text}" for name, text in report.workload.items()),
        "SLO, in ms": report.slo,
        **_origin(report),
    }
    notes = [text for level in report.levels for text in warnings(level)]
    return _page(
        f"Load test of {report.server.get('model', '')}",
        [
            _facts(facts),
            *(f'<p class="warning">{escape(text)}</p>' for text in notes),
            "<h2>Throughput</h2>",
            _table([throughput_row(level) for level in report.levels]),
            *(f"<p>{escape(text)}</p>" for text in conclusion(report)),
            _charts(charts.of_run(report.levels, _bounds(report.slo))),
            "<h2>Latency, in milliseconds</h2>",
            _table([row for level in report.levels for row in latency_rows(level)], "two"),
            f'<p class="note">{escape(_METHOD)}</p>',
        ],
    )


def _bounds(slo: str) -> dict[str, float]:
    """By latency; a bound on `itl` is one on the TPOT of requests."""
    found = dict(slo_.parse(slo).bounds) if slo else {}
    if "itl" in found:
        found.setdefault("tpot", found.pop("itl"))
    return found


def of_comparison(before: Report, after: Report, differences: Sequence[Difference]) -> str:
    """
    Returns:
        A page of HTML.
    """
    method = (
        "Medians of requests, and of the output tokens received in each second. The interval holds "
        "95 % of the differences of medians over 2,000 pairs of resampled runs (bootstrap, with "
        "replacement); it does not cover the variation between runs at other times."
    )
    return _page(
        "Comparison of two load tests",
        [
            "<h2>Before</h2>",
            _facts(_origin(before)),
            "<h2>After</h2>",
            _facts(_origin(after)),
            "<h2>Differences</h2>",
            _table([difference_row(one) for one in differences], "two"),
            f'<p class="note">{escape(method)}</p>',
            _charts(charts.of_two_runs(before.levels, after.levels)),
        ],
    )


def _origin(report: Report) -> dict[str, str]:
    return {
        "date": report.date,
        "commit": report.commit,
        "machine of the load generator": ", ".join(
            f"{text} {name}" if text.isdigit() else text for name, text in report.machine.items()
        ),
        "versions": ", ".join(f"{name} {text}" for name, text in report.versions.items()),
        "command": report.command,
    }


def _page(title: str, parts: Sequence[str]) -> str:
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>"
    )
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    return f"{head}\n<body>\n{body}\n</body>\n</html>\n"


def _facts(facts: Mapping[str, str]) -> str:
    rows = (
        f"<dt>{escape(name)}</dt><dd>{_value(name, text)}</dd>"
        for name, text in facts.items()
        if text
    )
    return f"<dl>{''.join(rows)}</dl>"


def _value(name: str, text: str) -> str:
    return f"<code>{escape(text)}</code>" if name == "command" else escape(text)


def _table(rows: Sequence[Mapping[str, str]], kind: str = "") -> str:
    columns = list(dict.fromkeys(name for row in rows for name, text in row.items() if text))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _charts(found: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(one.svg() for one in found)}</div>'
