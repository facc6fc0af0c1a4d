"""The picture of a step."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from inflight.cli.bench import picture
from inflight.cli.bench.trace import KernelTime, StepProfile

SVG = "{http://www.w3.org/2000/svg}"


def step(kind: str) -> StepProfile:
    kernels = [
        KernelTime("gemm", "linear", 7, 600.0, 0.6),
        KernelTime("attend", "attention", 1, 250.0, 0.25),
        KernelTime("begin_step", "batch state", 1, 2.0, 0.002),
    ]
    return StepProfile(kind, 20, 1000.0, 148.0, kernels, untraced_us=980.0)


def rectangles(text: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(text)
    return [rect for group in root.iter(f"{SVG}g") for rect in group.iter(f"{SVG}rect")]


def test_a_bar_has_a_part_for_each_group_and_they_fill_it():
    widths = [float(rect.attrib["width"]) for rect in rectangles(picture.svg("t", [step("a")]))]
    assert len(widths) == 4
    assert widths[0] / sum(widths) == pytest.approx(0.6, abs=1e-3)
    assert widths[3] / sum(widths) == pytest.approx(0.148, abs=1e-3)


def test_parts_stand_side_by_side_and_bars_below_each_other():
    found = rectangles(picture.svg("t", [step("decode"), step("prefill")]))
    first, second = found[:4], found[4:]
    for left, right in itertools.pairwise(first):
        end = float(left.attrib["x"]) + float(left.attrib["width"])
        assert float(right.attrib["x"]) == pytest.approx(end, abs=0.1)
    below = float(first[0].attrib["y"]) + float(first[0].attrib["height"])
    assert all(float(rect.attrib["y"]) > below for rect in second)


def test_every_group_is_named_and_so_is_the_length():
    text = picture.svg('a "title" & <more>', [step("decode")])
    words = [element.text for element in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert words[0] == 'a "title" & <more>'
    assert {"decode", "1.00 ms", "linear", "attention", "batch state", "gap"} <= set(words)
    assert "sampling" not in words


def test_it_has_colours_for_dark_pages():
    assert "prefers-color-scheme: dark" in picture.svg("t", [step("decode")])
