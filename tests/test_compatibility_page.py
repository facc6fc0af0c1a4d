"""docs/reference/compatibility.md is what the runs of clients wrote."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import compatibility_page
from compatibility_page import GROUPS, Row

ROOT = Path(__file__).resolve().parents[1]
EMPTY = "<!-- begin generated: suite -->\n\n<!-- end generated: suite -->\n"
ROWS = [
    Row("a client", "1.0", "/v1/models", "passed"),
    Row("another", "2.0", "vllm", "not run: needs `x`", "something"),
]


def run_script() -> ModuleType:
    path = ROOT / "tests" / "compat" / "run.py"
    spec = importlib.util.spec_from_file_location("compat_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def marked_clients() -> set[tuple[str, str]]:
    """Name and route of each marker `client` in the suite."""
    found = set()
    for path in (ROOT / "tests" / "integration").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.client":
                name, route = (ast.literal_eval(one) for one in node.args)
                found.add((name, route))
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_the_tables_are_in_the_form_that_the_runs_write(group: str) -> None:
    found = compatibility_page.rows(group)
    assert found
    assert len({(row.client, row.route) for row in found}) == len(found)
    for row in found:
        assert row.version != "not installed"
        assert row.result == "passed" or row.result.startswith("not run: "), row


def test_the_tables_have_a_row_for_each_script_and_each_marked_client() -> None:
    run = run_script()
    scripts = {
        *(
            (f"{backend}: {script.name}", suite.title)
            for backend, suites in run.SUITES.items()
            for suite in suites
            for script in suite.scripts
        ),
        *(
            (f"{backend}: {name}", run.SUITES[backend][0].title)
            for backend, reasons in run.NOT_RUN.items()
            for name in reasons
        ),
    }
    assert {(row.client, row.route) for row in compatibility_page.rows("scripts")} == scripts
    suite = {(row.client, row.route) for row in compatibility_page.rows("suite")}
    assert suite == marked_clients()


def test_rows_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{EMPTY}after\n")
    monkeypatch.setattr(compatibility_page, "PAGE", page)
    for rows in (ROWS, ROWS[:1]):
        compatibility_page.write("suite", rows)
        assert compatibility_page.rows("suite") == rows
    assert page.read_text().startswith("before\n<!--") and page.read_text().endswith("-->\nafter\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("| 1.0 |", "|  1.0 |"), "the table of suite is not as the tests write it"),
        (("| 1.0 |", "|"), "a row of suite does not have 5 cells"),
        (("begin generated: suite", "begin"), "has no block 'suite'; allowed: scripts, clients"),
    ],
)
def test_a_table_that_was_edited_is_refused(change: tuple[str, str], message: str) -> None:
    text = EMPTY.replace("\n\n", f"\n\n{compatibility_page.table(ROWS)}\n")
    assert compatibility_page.rows("suite", text) == ROWS
    with pytest.raises(ValueError, match=message):
        compatibility_page.rows("suite", text.replace(*change))
