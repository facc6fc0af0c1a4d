"""Functions stay short and take few parameters; folders hold few modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 60
MAX_PARAMETERS = 8  # self and cls apart
MAX_MODULES = 14  # of a folder, with its __init__

# Found by their modules, one for each of their kind.
FULLER = {"backend/inflight/models/families"}

# Their parts and limits, most by keyword alone.
LONG_SIGNATURES = {
    "backend/inflight/engine/engine.py:Engine.__init__",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[Path]:
    for folder in ("backend", "kernels", "client"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def functions() -> Iterator[tuple[str, Function]]:
    """Each with its module's path and its name, after those of the classes around it."""
    for path in modules():
        yield from _functions(ast.parse(path.read_text()), f"{path.relative_to(ROOT).as_posix()}:")


def _functions(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        is_named = isinstance(node, Function | ast.ClassDef)
        yield from _functions(node, f"{prefix}{node.name}." if is_named else prefix)


def num_lines(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(node: Function) -> int:
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    return len([*names, *node.args.kwonlyargs]) - (names[:1] in (["self"], ["cls"]))


def test_functions_are_short() -> None:
    assert [name for name, node in functions() if num_lines(node) > MAX_LINES] == []


def test_functions_take_few_parameters() -> None:
    found = {name for name, node in functions() if num_parameters(node) > MAX_PARAMETERS}
    assert found == LONG_SIGNATURES


def test_folders_hold_few_modules() -> None:
    counts: dict[str, int] = {}
    for path in modules():
        folder = path.parent.relative_to(ROOT).as_posix()
        counts[folder] = counts.get(folder, 0) + 1
    assert {folder for folder, count in counts.items() if count > MAX_MODULES} <= FULLER
