"""docs/reference/compatibility.md: a row for each client and layout or route, written by tests.

This module imports the standard library alone: clients' environments have none of ours.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
COLUMNS = ("Client", "Version", "Layout or route", "Result", "Lacking")
# Blocks of the page: of tests/compat/run.py, and of tests/compat/clients.py.
GROUPS = ("scripts", "clients", "suite")


@dataclass(frozen=True)
class Row:
    """What became of a client on a layout or route.

    Attributes:
        result: `passed`, `failed: ` and where, or `not run: ` and why.
        lacking: what the client can do and the server cannot, or what was left out.
    """

    client: str
    version: str
    route: str
    result: str
    lacking: str = ""


def table(rows: list[Row]) -> str:
    """In Markdown, as the page has it."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(astuple, rows)]
    return "".join(_line(cells) for cells in lines)


def rows(group: str, text: str | None = None) -> list[Row]:
    """The rows of a block, by default those of the page.

    Raises:
        ValueError: the block is missing, or not in the form that `table` writes.
    """
    body = _block(group, PAGE.read_text() if text is None else text)[0]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in body.strip().splitlines()[2:]
    ]
    if any(len(cells) != len(COLUMNS) for cells in lines):
        raise ValueError(f"{PAGE.name}: a row of {group} does not have {len(COLUMNS)} cells")
    found = [Row(*cells) for cells in lines]
    if f"{table(found)}\n" != body:
        raise ValueError(f"{PAGE.name}: the table of {group} is not as the tests write it")
    return found


def write(group: str, found: list[Row]) -> None:
    """Replace the rows of a block of the page."""
    text = PAGE.read_text()
    _, start, end = _block(group, text)
    PAGE.write_text(f"{text[:start]}{table(found)}\n{text[end:]}")


def _line(cells: tuple[str, ...]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"


def _block(group: str, text: str) -> tuple[str, int, int]:
    """Its table, and where that starts and ends."""
    begin, end = (f"<!-- {word} generated: {group} -->" for word in ("begin", "end"))
    found = re.search(rf"{begin}\n\n(.*?){end}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE.name}: has no block {group!r}; allowed: {', '.join(GROUPS)}")
    return found[1], *found.span(1)
