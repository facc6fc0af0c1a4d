"""Tables of results: drawn on a terminal, otherwise plain aligned lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

Cells = Mapping[str, str]


class Tables:
    """Writes tables and lines; by default to standard output."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def table(self, title: str, rows: Sequence[Cells], num_left: int = 2) -> None:
        """A column for each name with a value in any row.

        Args:
            num_left: the first columns, which are aligned to the left; numbers are to the right.
        """
        columns = list(dict.fromkeys(name for row in rows for name, text in row.items() if text))
        if not self._console.is_terminal:
            if title:
                self.line(title)
            for line in _aligned(columns, rows, num_left):
                self.line(line)
            return
        table = Table(title=title or None, title_justify="left")
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index < num_left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row.get(name, "") for name in columns))
        self._console.print(table)

    def line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def number(value: float) -> str:
    """A number with thousands separators, and one decimal if below 1000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _aligned(columns: Sequence[str], rows: Sequence[Cells], num_left: int) -> list[str]:
    lines = [list(columns), *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return [
        "  ".join(
            text.ljust(width) if index < num_left else text.rjust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
