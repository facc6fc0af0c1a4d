"""`inflight usage`: what tenants have used."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from inflight.access import ledger


def show(path: Path | None, *, tenant: str | None, since: str, as_json: bool) -> None:
    """Print the days of a ledger.

    Raises:
        ConfigError: there is none.
    """
    days = ledger.read(path or ledger.default_path(), tenant, since)
    if as_json:
        typer.echo(msgspec.json.encode(days).decode())
        return
    table = Table(*(name.replace("_", " ") for name in ledger.Day.__struct_fields__), box=None)
    for day in days:
        table.add_row(*(str(value) for value in msgspec.structs.astuple(day)))
    Console().print(table)
