"""Results of the full counts, in benchmarks/results/long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import result

_FOLDER = result.ROOT / "benchmarks" / "results" / "long"


def write(name: str, benchmark: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    result.write(_FOLDER / f"{name}.json", benchmark, rows, **facts)


def collected(name: str, benchmark: str) -> Iterator[list[dict[str, Any]]]:
    """For a fixture: a list for the rows of the tests; written at the end if there are any."""
    rows: list[dict[str, Any]] = []
    yield rows
    if rows:
        write(name, benchmark, rows)
