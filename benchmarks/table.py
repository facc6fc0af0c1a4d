"""Write the tables of benchmarks/README.md from results/*.json: python benchmarks/table.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bars
from inflight.cli.bench import show

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def table(result: dict[str, Any]) -> str:
    """One result file in Markdown: heading, provenance, rows."""
    rows = [cells(result["benchmark"], row) for row in result["rows"]]
    columns = list(dict.fromkeys(name for row in rows for name, text in row.items() if text))
    machine = ", ".join(
        f"{value} {name}" if isinstance(value, int) else value
        for name, value in result["machine"].items()
    )
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lines = [f"### {result['benchmark']}", ""]
    if "workload" in result:
        lines += [result["workload"] + ".", ""]
    lines += [f"Commit {result['commit']}; {machine}; {versions}.", ""]
    if result.get("facts"):
        lines += ["; ".join(show.facts(result["facts"], result["start"])) + ".", ""]
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|---" + "|---:" * (len(columns) - 1) + "|")
    for row in rows:
        lines.append("| " + " | ".join(row.get(name, "") for name in columns) + " |")
    if result.get("peer"):
        lines += ["", f"Peer: {result['peer']}."]
    return "\n".join(lines) + "\n"


def cells(benchmark: str, row: dict[str, Any]) -> dict[str, str]:
    """A row as text, without lists and objects such as the times of all runs."""
    if benchmark.startswith("engine"):
        return bars.cells(row)
    return {name: str(value) for name, value in row.items() if not isinstance(value, list | dict)}


def main() -> None:
    found = [json.loads(path.read_text()) for path in sorted(HERE.glob("results/*.json"))]
    results = [result for result in found if "rows" in result]  # reports of load tests have none
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n".join(table(result) for result in results)
    readme.write_text(before + BEGIN + tables + END + after)


if __name__ == "__main__":
    main()
