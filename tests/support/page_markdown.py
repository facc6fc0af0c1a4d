"""Random texts of Markdown's marks, and the page's parser in node."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import inflight.door.gateway.page

SOURCE = Path(inflight.door.gateway.page.__path__[0]) / "markdown.js"
MARKS = [
    *(
        "*",
        "**",
        "***",
        "_",
        "__",
        "`",
        "``",
        "```",
        "~~",
        "~~~",
        "[",
        "]",
        "(",
        ")",
        "](",
        "![",
        "!",
    ),
    *(
        "# ",
        "## ",
        "###### ",
        "> ",
        "- ",
        "+ ",
        "* ",
        "1. ",
        "12) ",
        "---",
        "***",
        "|",
        "|-|",
        "\\",
    ),
    *("\n", "\n", "\n\n", " ", "  ", "    ", "\t", "\r\n", "<", ">", "&", '"', "'", "\0", "\u2028"),
    *("<script>", "</div>", "<img onerror=", "javascript:", "data:text/html,", "vbscript:", "JaVa"),
    *(
        "https://a.b/",
        "http://",
        "mailto:",
        "HTTPS://x",
        "[l](https://a.b)",
        "](javascript:",
        "é",
        "😀",
    ),
    *("**b**", "*e*", "~~d~~", "`c`", "|a|b|\n|-|-|\n|1|2|\n", "```py\n", "\n```\n", "&lt;", "--"),
]
# Reads a list of texts; writes, for each, its tree (none of a long text) and the CPU time in ms, of
# a long text the least of three, as the compiler and the garbage collector run in between.
DRIVER = """
import { readFileSync } from "node:fs";
import { parse } from "./markdown.mjs";
const found = JSON.parse(readFileSync(0, "utf8")).map((text) => {
    const isLong = text.length > 10000;
    const times = [];
    let tree = [];
    while (times.length < (isLong ? 3 : 1)) {
        const before = process.cpuUsage();
        tree = parse(text);
        times.push(process.cpuUsage(before).user);
    }
    return [isLong ? [] : tree, Math.min(...times) / 1e3];
});
process.stdout.write(JSON.stringify(found));
"""


def a_text(generator: random.Random, num_parts: int = 40) -> str:
    """Marks and words, each of which occurs once."""
    parts = []
    for number in range(generator.randrange(num_parts)):
        is_word = generator.random() < 0.4
        parts.append(f"word{number}x" if is_word else generator.choice(MARKS))
    return "".join(parts)


def parse(texts: list[str], folder: Path) -> list[tuple[list[Any], float]]:
    """The tree of each text, empty for a long one, and the milliseconds of CPU time.

    Skips the test without node.
    """
    node = shutil.which("node")
    if node is None:
        # No package of Python brings node, which runs the page's module outside a browser.
        # tests/backend/door/gateway/page/test_browser.py tests the rendered text in Chromium.
        pytest.skip("needs node on PATH")
    shutil.copy(SOURCE, folder / "markdown.mjs")
    (folder / "driver.mjs").write_text(DRIVER)
    done = subprocess.run(
        [node, "driver.mjs"],
        cwd=folder,
        input=json.dumps(texts).encode(),
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [(tree, milliseconds) for tree, milliseconds in json.loads(done.stdout)]
