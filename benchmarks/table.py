"""Write the tables of benchmarks/README.md from results/*.json: python benchmarks/table.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def table(result: dict[str, Any]) -> str:
    """One result file as a heading, where it comes from, and its rows."""
    rows = result["rows"]
    columns = list(rows[0])
    machine = ", ".join(str(value) for value in result["machine"].values())
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lines = [f"### {result['benchmark']}", ""]
    if "workload" in result:
        lines += [result["workload"] + ".", ""]
    lines += [f"Commit {result['commit']}; {machine} cores; {versions}.", ""]
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|---" + "|---:" * (len(columns) - 1) + "|")
    lines += ["| " + " | ".join(str(row[name]) for name in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    results = [json.loads(path.read_text()) for path in sorted(HERE.glob("results/*.json"))]
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    tables = "\n".join(table(result) for result in results)
    readme.write_text(before + BEGIN + tables + END + after)


if __name__ == "__main__":
    main()
