"""Points of the security checklist that the sources show (docs/reliability.md has the list)."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each runs code from data, or hides what it runs.
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "code"}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "hub"),
    ("os", "system"),
    ("os", "popen"),
    ("subprocess", "getoutput"),
    ("numpy", "load"),
    ("np", "load"),
}
BANNED_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
# What connects to an address that a request could name.
BANNED_CLIENTS = {"requests", "urllib3", "aiohttp", "httpx", "ftplib", "smtplib"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("backend", "kernels", "client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imports(node: ast.AST) -> set[str]:
    """The top packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def dangers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        yield from imports(node) & (BANNED_IMPORTS | BANNED_CLIENTS)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in BANNED_ATTRIBUTES:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_BUILTINS:
                yield node.func.id
            yield from {one.arg or "" for one in node.keywords} & BANNED_KEYWORDS


def narrows(test: ast.expr) -> bool:
    """Whether an assertion's test only states a type: `is None`, `is not None`, isinstance."""
    if isinstance(test, ast.BoolOp):
        return all(map(narrows, test.values))
    if isinstance(test, ast.Compare):
        return all(isinstance(one, ast.Is | ast.IsNot) for one in test.ops)
    return (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id == "isinstance"
    )


def test_01_nothing_runs_code_from_data() -> None:
    found = {path: sorted(dangers(tree)) for path, tree in sources()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import nn\nimport torch\ntorch.load('x')",
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "from_pretrained('x', trust_remote_code=True)",
        "import requests",
    ],
)
def test_01_the_check_finds_what_it_looks_for(source: str) -> None:
    assert list(dangers(ast.parse(source)))


def test_18_no_assertion_is_a_check() -> None:
    """`python -O` removes assertions: they may only tell the type checker what holds anyway."""
    found = [
        f"{path}:{node.lineno}"
        for path, tree in sources()
        if path.startswith(("backend", "client"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert found == []


REFUSALS = """
import sys
sys.path.insert(0, "tests/support")
import bad_grpc, msgspec
from inflight.core.request import Request
from inflight.door.grpc import checks
from inflight.door.limits import Limits
from inflight.errors import InflightError
from inflight.ipc.frames import Submit, _decoder, _encoder
from inflight.sampling.params import SamplingParams

for name, (data, _) in bad_grpc.CASES.items():
    try:
        checks.infer_request(data, Limits())
        print(name, "accepted")
    except InflightError as error:
        print(name, error)
for params in ({"top_p": 7.0}, {"temperature": -1.0}, {"stop_words": [""]}, {"seed": -1}):
    frame = {"type": "submit", "request": {"request_id": 1, "prompt_ids": [1], "params": params}}
    try:
        _decoder.decode(msgspec.msgpack.encode(frame))
        print(params, "accepted")
    except (InflightError, msgspec.MsgspecError) as error:
        print(params, error)
print(__debug__)
"""


def refusals(*flags: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *flags, "-c", REFUSALS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_18_optimised_code_refuses_the_same() -> None:
    plain, optimised = refusals(), refusals("-O")
    assert (plain.pop(), optimised.pop()) == ("True", "False")
    assert plain == optimised
    assert len(plain) > 50 and not [line for line in plain if line.endswith(" accepted")]


def test_19_every_dependency_has_a_pinned_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert len(pinned) > 30
    assert [line for line in pinned if "==" not in line] == []


def pins(path: Path) -> dict[str, str]:
    """Versions by normalized name."""
    found = re.findall(r"(?m)^([\w.-]+)==([^\s\\]+)", path.read_text())
    return {normalized(name): version for name, version in found}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> set[str]:
    """What a server needs directly, but for torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(one for x in EXTRAS for one in extras[x])]
    names = {re.split(r"[^\w.-]", one)[0] for one in requirements}
    return {normalized(name) for name in names} - {"torch"}


EXTRAS = ("triton", "cuda", "otel")


def test_19_the_lock_has_hashes_and_agrees_with_the_constraints() -> None:
    lock, constraints = pins(ROOT / "requirements.lock"), pins(ROOT / "constraints.txt")
    assert {name: lock.get(name) for name in constraints if name in lock} == {
        name: version for name, version in constraints.items() if name in lock
    }
    assert set(lock) <= set(constraints), "run `make lock` after a change of constraints.txt"
    assert needed() <= set(lock)
    entries = re.split(r"(?m)^(?=[\w.-]+==)", (ROOT / "requirements.lock").read_text())[1:]
    assert len(entries) == len(lock)
    hashed = re.compile(r"[\w.-]+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    assert [entry for entry in entries if not hashed.fullmatch(entry)] == []


# Its schema is checked but for the syntax of IRIs, for which a parser needs 15 s.
SBOM = """
import runpy, sys
sys.modules["rfc3987_syntax"] = None
runpy.run_module("cyclonedx_py", run_name="__main__")
"""


def test_19_the_bill_of_materials_has_each_dependency(tmp_path: Path) -> None:
    """As `make sbom` writes it."""
    path = tmp_path / "sbom.json"
    command = [sys.executable, "-c", SBOM, "environment"]
    command += ["--pyproject", "pyproject.toml", "--output-reproducible", "--output-file"]
    subprocess.run([*command, str(path), sys.executable], cwd=ROOT, check=True, timeout=200)
    bill = json.loads(path.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "inflight-triton"
    found = {normalized(one["name"]): one for one in bill["components"]}
    assert needed() | {"torch"} <= set(found)
    assert all(found[name]["purl"].startswith("pkg:pypi/") for name in needed())
