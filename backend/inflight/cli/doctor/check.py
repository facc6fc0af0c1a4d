"""A check of `inflight doctor`, and how checks are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "note", "broken"]

STYLES: dict[Status, str] = {"ok": "green", "note": "yellow", "broken": "red"}
_WIDTH = max(map(len, STYLES))


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: what was checked.
        status: `broken` keeps the server from working; `note` is informational.
        found: what was found.
        mend: how to fix it; "" if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


def to_json(checks: Sequence[Check]) -> str:
    """A list of objects, for programs."""
    return msgspec.json.format(msgspec.json.encode(checks)).decode()


def show(checks: Sequence[Check], console: Console | None = None) -> None:
    """Print a table on a terminal, otherwise a line per check."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        console.print(_table(checks))
        return
    for check in checks:
        # Paths and library names may contain brackets: no markup.
        line = Text.assemble(_mark(check), " ", check.name, ": ", check.found)
        console.print(line, soft_wrap=True)
        if check.mend:
            console.print(Text(" " * (_WIDTH + 3) + check.mend), soft_wrap=True)


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("STATUS", "CHECK", "FOUND"):
        table.add_column(title, overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.mend:
            found.append(f"\n{check.mend}", style="dim")
        table.add_row(_mark(check), Text(check.name), found)
    return table


def _mark(check: Check) -> Text:
    return Text(f"{check.status:<{_WIDTH}}", style=STYLES[check.status])
