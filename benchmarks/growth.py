"""Count the files that additions touched, in real commits: python benchmarks/growth.py [--check]

growth.json lists commits by what they added. Of a commit, the files counted are those that are
neither tests nor written by `make generate`. The table is written to docs/growth.md; with --check
nothing is written, and the exit status is 1 if the page does not match the commits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from inflight.deploy import generate

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = ROOT / "docs/growth.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"

LIMITS = {
    "option": 3,
    "setting": 2,
    "op": 4,
    "family": 1,
    "drafting method": 1,
    "weight format": 1,
}
"""Maximum number of files per addition."""


def counted(paths: Iterable[str], generated: Collection[str]) -> list[str]:
    """The files edited by hand, without tests.

    Args:
        paths: the files of a commit, relative to the checkout.
        generated: the files that `make generate` writes, whole or in part.
    """
    return [
        path
        for path in paths
        if path not in generated and not path.startswith(("tests/", "docs/reference/"))
    ]


def git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True
    ).stdout


def rows(
    commits: dict[str, list[str]], checkout: Path, generated: Collection[str]
) -> list[list[str]]:
    """One table row per commit.

    Raises:
        SystemExit: an addition has no limit in LIMITS.
        CalledProcessError: a commit is not in the checkout's history.
    """
    found = []
    for what, hashes in commits.items():
        if what not in LIMITS:
            raise SystemExit(f"growth.json: unknown key {what!r}; allowed: {', '.join(LIMITS)}")
        for commit in hashes:
            subject = git(checkout, "log", "-1", "--format=%s", commit).strip()
            changed = git(
                checkout, "diff-tree", "--no-commit-id", "--name-only", "--root", "-r", commit
            )
            files = counted(changed.splitlines(), generated)
            names = ", ".join(f"`{file}`" for file in files)
            found.append(
                [what, commit[:7], subject, str(len(files)), str(LIMITS[what]), names or "none"]
            )
    return found


def table(lines: list[list[str]]) -> str:
    titles = ["Added", "Commit", "Subject", "Files", "At most", "Which"]
    every = [titles, ["---"] * len(titles), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in every)


def main(arguments: list[str]) -> int:
    commits = json.loads((HERE / "growth.json").read_text())
    text = table(rows(commits, ROOT, set(generate.generated())))
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    new = before + BEGIN + text + END + after
    print(text, end="")
    if "--check" in arguments:
        return 0 if new == page else 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
