"""The page's Markdown parser, in node."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page_markdown import a_text, parse

TAGS = {
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "blockquote", "pre", "ul", "ol", "li"),
    *("table", "thead", "tbody", "tr", "th", "td", "strong", "em", "del", "code", "a"),
}


def nodes(tree: list[Any]) -> Iterator[dict[str, Any]]:
    for node in tree:
        if isinstance(node, dict):
            yield node
            yield from nodes(node["children"])


def brief(tree: list[Any]) -> str:
    """Nodes as tag(children), texts as they are."""
    return "".join(
        node if isinstance(node, str) else f"{node['tag']}({brief(node['children'])})"
        for node in tree
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\n\nc", "p(a\nb)p(c)"),
        ("# One\n## Two ##\n#no", "h1(One)h2(Two)p(#no)"),
        ("**b** *i* __b__ _i_", "p(strong(b) em(i) strong(b) em(i))"),
        ("~~d~~ ***x***", "p(del(d) em(strong(x)))"),
        ("**a *b* c**", "p(strong(a em(b) c))"),
        ("snake_case_name 2 * 3 * 4", "p(snake_case_name 2 * 3 * 4)"),
        ("**open and *open", "p(**open and *open)"),
        ("`a*b*` `` c`d `` `open", "p(code(a*b*) code(c`d) `open)"),
        (r"\*a\* \x", r"p(*a* \x)"),
        ("- a\n- b\n  - c\n\n    more\n- d", "ul(li(a)li(bul(li(p(c)p(more))))li(d))"),
        ("1. a\n2. b\n\ntext", "ol(li(a)li(b))p(text)"),
        ("* a\n\n* b", "ul(li(a)li(b))"),
        ("- a\n1. b", "ul(li(a))ol(li(b))"),
        ("text\n- a", "p(text)ul(li(a))"),
        ("1. x\n   ```\n   code\n     more\n   ```\n2. y", "ol(li(xpre(code\n  more))li(y))"),
        ("```py\n# *a*\n\n<b>\n```\nx", "pre(# *a*\n\n<b>)p(x)"),
        ("~~~\n```\n~~~", "pre(```)"),
        ("```\nopen", "pre(open)"),
        ("> a\n> - b\n\nc", "blockquote(p(a)ul(li(b)))p(c)"),
        ("a\n\n---\nb", "p(a)hr()p(b)"),
        (
            "| a | b |\n|:--|---|\n| 1 | `2` |\n\nx",
            "table(thead(tr(th(a)th(b)))tbody(tr(td(1)td(code(2)))))p(x)",
        ),
        ("[a *b*](https://x.y/z)", "p(a(a em(b)))"),
        ("see https://x.y/a_(b)_c.", "p(see a(https://x.y/a_(b)_c).)"),
        ("[x](javascript:alert(1)) [y](/path)", "p([x](javascript:alert(1)) [y](/path))"),
        ("![alt](https://x.y/z.png)", "p(a(alt))"),
        ("<b>&lt;</b>", "p(<b>&lt;</b>)"),
        ("", ""),
    ],
)  # fmt: skip
def test_markdown_becomes_a_tree(text: str, expected: str, tmp_path: Path) -> None:
    ((tree, _),) = parse([text], tmp_path)
    assert brief(tree) == expected


def test_details_are_kept(tmp_path: Path) -> None:
    text = "```c++ title\nx\n```\n7. a\n\n[a](https://b.c/(d)?e=f#g) [m](mailto:a@b.c)"
    ((tree, _),) = parse([text], tmp_path)
    found = {node["tag"]: node for node in nodes(tree)}
    assert found["pre"]["language"] == "c++ title"
    assert found["ol"]["start"] == 7
    hrefs = [node["href"] for node in nodes(tree) if node["tag"] == "a"]
    assert hrefs == ["https://b.c/(d)?e=f#g", "mailto:a@b.c"]


def test_random_texts_become_harmless_and_lose_no_word(tmp_path: Path) -> None:
    generator = random.Random(7)
    texts = [a_text(generator) for _ in range(5000)]
    for text, (tree, _) in zip(texts, parse(texts, tmp_path), strict=True):
        shown = brief(tree)
        for node in nodes(tree):
            assert node["tag"] in TAGS, text
            assert set(node) <= {"tag", "children", "href", "start", "language"}, text
            if "href" in node:
                assert re.match(r"(?:https?://|mailto:)[^\s<>\"`]+$", node["href"], re.I), text
                shown += node["href"]
            shown += node.get("language", "")
        words = re.findall(r"word\d+x", text)
        assert [word for word in words if word not in shown] == [], text


def test_the_time_is_linear_in_the_text(tmp_path: Path) -> None:
    marks = [
        *("*a ", "_a ", "**a", "***a", "[", "](", "[a](", "![", "`", "``a`", "~~a", "\\", "(", "|"),
        *("> ", "- ", "  - a\n", "1. ", "|a\n|-\n", "http://", "[a](http://", "> - ", "*a* ", " "),
        *(
            "\n",
            "#",
            "`a``b",
            "*_",
            "[a](https://b(",
            "-\n",
            "```\n",
            "a|",
            "\\|",
            "*a*_b_",
            "---|",
        ),
    ]
    slow = [(mark, 0.0, 0.0) for mark in marks]
    for _ in range(3):  # what a busy machine has delayed is not slow each time
        slow = not_linear([mark for mark, _, _ in slow], tmp_path)
    assert slow == []


def not_linear(marks: list[str], folder: Path) -> list[tuple[str, float, float]]:
    """Those whose long text takes more than 40 times as long as one of a tenth of its length, and
    the times of both. Quadratic ones would take a hundred times as long."""
    if not marks:
        return []
    texts = [mark * (size // len(mark)) for size in (200_000, 20_000) for mark in marks]
    times = [milliseconds for _, milliseconds in parse(texts, folder)]
    pairs = zip(marks, times[: len(marks)], times[len(marks) :], strict=True)
    return [one for one in pairs if one[1] > 40 * max(one[2], 3.0)]
