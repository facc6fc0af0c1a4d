"""Settings of the whole suite."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
INTEGRATION = ROOT / "tests" / "integration"
# By far the longest of those without servers: a minute of one core, which compiles all kernels.
LONGEST = ROOT / "tests" / "kernels" / "runtime" / "test_compile.py"

# The gate's result depends on the code alone: its examples are the same each time. `make test-long`
# draws new ones. An example may take as long as a busy machine needs.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", PATIENT, derandomize=True)
settings.register_profile("search", PATIENT, max_examples=1000)
settings.load_profile("gate")

collect_ignore = ["compat"]  # make compat

# Before anything imports torch: the suite runs alongside its own servers (see
# host_process.limit_spinning).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# jsonschema would compile 38 grammars with it at import, in each process, for formats that no test
# checks. It comes with cyclonedx-bom.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# Of several processes that run tests, each has its share of the cores.
_num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _num_processes > 1:
    _num_threads = max(1, (os.cpu_count() or 1) // _num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(_num_threads))


def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores, up to five: about one of them waits for a server at a time. A
    further one takes as much from the others as it adds."""
    return min(os.cpu_count() or 1, 4) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of integration tests, which mostly wait, evenly over the others, of which
    the longest one is the first: at the end, its process would run alone."""
    items.sort(key=lambda item: item.path != LONGEST)
    files: dict[bool, dict[Path, list[pytest.Item]]] = {True: {}, False: {}}
    for item in items:
        is_integration = item.path.is_relative_to(INTEGRATION)
        files[is_integration].setdefault(item.path, []).append(item)
    placed = [
        (number / len(group), tests)
        for group in files.values()
        for number, tests in enumerate(group.values())
    ]
    items[:] = [item for _, tests in sorted(placed, key=itemgetter(0)) for item in tests]


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A process gets whole files; one of them gets all files that use the servers of the session,
    so that these are started once, and one those that use its gateway."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "|".join(_servers_of(file)) or file


@functools.cache
def _servers_of(file: str) -> tuple[str, ...]:
    """The fixtures of servers of the session that the files of its process share with it."""
    path = ROOT / file
    text = path.read_text() if path.parent == INTEGRATION else ""
    for fixtures in (("cpu", "echo"), ("gateway",)):
        names = "|".join(fixtures)
        if re.search(rf"^(?: {{4}})?def \w+\((?:[^)]*\s)?(?:{names})\b", text, re.MULTILINE):
            return fixtures
    return ()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """One of several processes ends the servers of the session after the last file that uses them,
    not with the session: idle, they take a few percent of a core."""
    yield
    if nextitem is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    servers, others = (_servers_of(one.nodeid.partition("::")[0]) for one in (item, nextitem))
    for name in servers if servers != others else ():
        for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
            fixture.finish(item._request)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay until the end: each full garbage collection would visit them all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A test that has torch compute on one thread does so for itself."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
