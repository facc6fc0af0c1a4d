"""Checks as users and programs see them."""

from __future__ import annotations

import io
import json

from rich.console import Console

from inflight.cli.doctor.check import Check, show, to_json

CHECKS = [
    Check("Python", "ok", "3.11 in /opt/[venv]"),
    Check("numpy", "broken", "2.1", "run: pip install 'numpy<2'"),
]


def shown(is_terminal: bool) -> str:
    output = io.StringIO()
    show(CHECKS, Console(file=output, force_terminal=is_terminal, width=80, color_system=None))
    return output.getvalue()


def test_a_line_per_check_has_its_remedy_below() -> None:
    assert shown(False).splitlines() == [
        "ok     Python: 3.11 in /opt/[venv]",
        "broken numpy: 2.1",
        "         run: pip install 'numpy<2'",
    ]


def test_a_terminal_gets_a_table() -> None:
    title, first, second, remedy = (line.split() for line in shown(True).splitlines())
    assert title == ["STATUS", "CHECK", "FOUND"]
    assert first == ["ok", "Python", "3.11", "in", "/opt/[venv]"]
    assert second == ["broken", "numpy", "2.1"]
    assert remedy == ["run:", "pip", "install", "'numpy<2'"]


def test_programs_get_a_list_of_objects() -> None:
    found = json.loads(to_json(CHECKS))
    assert [one["status"] for one in found] == ["ok", "broken"]
    assert found[1] == {
        "name": "numpy",
        "status": "broken",
        "found": "2.1",
        "mend": "run: pip install 'numpy<2'",
    }
