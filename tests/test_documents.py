"""Consistency of the README and the pages in docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "benchmarks/README.md",
    ROOT / "benchmarks/kernels/README.md",
    ROOT / "examples/README.md",
    ROOT / "examples/deployment/README.md",
]
# [text](target), outside code.
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path in backquotes, from the checkout or from the folder of the page.
CODE_PATH = re.compile(
    r"`((?:backend|kernels|client|tests|benchmarks|docs|examples|ensembles|model_repository)/[\w./-]+)`"
)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_the_checkout_exist(page: Path) -> None:
    for path in CODE_PATH.findall(prose(page)):
        assert (ROOT / path).exists() or (page.parent / path).exists(), path


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / target.split("#")[0]).resolve() for target in LINK.findall(prose(index))
    }
    assert {page for page in ROOT.glob("docs/**/*.md") if page != index} <= linked
