"""What the pages name exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_reliability_page_has_a_row_for_each_bad_input() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text().partition("## Faults")[0]
    found: set[int] = set()
    for numbers in re.findall(r"^\| (\d[^|]*) \|", page, re.MULTILINE):
        for first, last in re.findall(r"(\d+)(?:(?: to |-)(\d+))?", numbers):
            found |= set(range(int(first), int(last or first) + 1))
    assert sorted(set(range(1, 108)) - found) == []


def test_every_test_that_the_reliability_page_names_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    paths = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in paths}
    for path in paths:
        known |= set(re.findall(r"def (test_\w+)", path.read_text()))
    # Some are cut short: `test_probes_*`, `test_sigterm_...`.
    named = set(re.findall(r"\b(test_\w+)", page))
    assert len(named) > 50
    missing = [
        name
        for name in sorted(named)
        if name not in known
        and not (name.endswith("_") and any(one.startswith(name) for one in known))
    ]
    assert missing == []
