"""Deadlines, heartbeats and limits use the monotonic clock: a wall clock may jump."""

from __future__ import annotations

import ast
from pathlib import Path

BACKEND = Path(__file__).resolve().parents[1] / "backend" / "inflight"

# What is shown to people or is about a date: the time of records, a day of usage, the expiry of a
# key, the date in a chat template. In metrics, a number that differs from engine to engine.
USES_THE_DATE = {
    "access/audit.py",
    "access/key.py",
    "access/ledger.py",
    "cli/bench/serving/results/environment.py",
    "cli/keys.py",
    "door/gateway/directory.py",
    "door/gateway/openai/chunks.py",
    "door/gateway/openai/responses/result.py",
    "door/http/middleware.py",
    "engine/metrics/recorder.py",
    "log.py",
    "text/jinja_sandbox.py",
}
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("datetime", "fromtimestamp"),
}


def reads_the_wall_clock(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if (name, node.attr) in WALL_CLOCKS or node.attr == "CLOCK_REALTIME":
                return True
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            return True  # by its own name it would not be found above
    return False


def test_only_dates_come_from_the_wall_clock() -> None:
    found = {
        path.relative_to(BACKEND).as_posix()
        for path in BACKEND.rglob("*.py")
        if reads_the_wall_clock(path)
    }
    assert found == USES_THE_DATE
