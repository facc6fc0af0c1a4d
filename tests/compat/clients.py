"""Runs clients of other projects, as tests, and notes what became of each of them.

    python tests/compat/clients.py GROUP [--write] [PYTEST ARGUMENTS]

GROUP is `clients`: the tests in this folder, in the environment of requirements.txt, with the path
of the command `inflight` in the variable INFLIGHT; or `suite`: those tests of tests/integration
that have the marker `client`, in the server's environment. It ends with a table of clients, routes
and results, which --write writes to docs/reference/compatibility.md. The status is pytest's.

The marker of a test, a module or a parameter names the client:

    pytest.mark.client(NAME, ROUTE, package=DISTRIBUTION, version=..., lacking=...)

The version is that of the installed package, unless `version` says it. All tests of a client and
route make one row, which has passed if each of them has.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import compatibility_page
from compatibility_page import Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ARGUMENTS = {
    "clients": ["-c", str(HERE / "pytest.ini"), f"--rootdir={HERE}", f"--confcutdir={HERE}"],
    "suite": ["-m", "client", "tests/integration"],
}
FOLDERS = {"clients": HERE, "suite": ROOT}


class Results:
    """A plugin of pytest that makes rows of what it runs."""

    def __init__(self) -> None:
        # By client and route: its version and what it lacks, then the outcome of each test.
        self._clients: dict[tuple[str, str], tuple[str, str]] = {}
        self._outcomes: dict[tuple[str, str], dict[str, str]] = {}

    def rows(self) -> list[Row]:
        found = []
        for (name, route), (version, lacking) in self._clients.items():
            outcomes = self._outcomes[name, route].values()
            failed = [one for one in outcomes if one.startswith("failed")]
            skipped = [one for one in outcomes if one.startswith("not run")]
            result = next(iter([*failed, *skipped, "passed"]))
            found.append(Row(name, version, route, result, lacking))
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        mark = item.get_closest_marker("client")
        if mark is not None:
            name, route = mark.args
            outcomes = self._outcomes.setdefault((name, route), {})
            self._clients[name, route] = _version(mark.kwargs), mark.kwargs.get("lacking", "")
            if report.failed:
                outcomes[item.nodeid] = f"failed: {item.name}"
            elif report.skipped:
                outcomes[item.nodeid] = f"not run: {report.longrepr[2].removeprefix('Skipped: ')}"
            else:
                outcomes.setdefault(item.nodeid, "passed")
        return report


def _version(fields: dict[str, str]) -> str:
    if "version" in fields:
        return fields["version"]
    try:
        return metadata.version(fields["package"])
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=sorted(ARGUMENTS))
    parser.add_argument("--write", action="store_true")
    arguments, further = parser.parse_known_args()
    if "INFLIGHT" in os.environ:
        os.environ["INFLIGHT"] = str(Path(os.environ["INFLIGHT"]).absolute())
    os.chdir(FOLDERS[arguments.group])
    results = Results()
    status = pytest.main([*ARGUMENTS[arguments.group], *further], plugins=[results])
    found = results.rows()
    print(f"\n{compatibility_page.table(found)}")
    if arguments.write:
        compatibility_page.write(arguments.group, found)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
