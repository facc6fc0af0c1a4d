"""The dashboards in docs/grafana ask for metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.deploy.server_families import SERVER_FAMILIES
from inflight.engine.metrics.families import FAMILIES, LABELS, Family, published

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "grafana"
DASHBOARDS = sorted(FOLDER.glob("*.json"))

_FUNCTIONS = {
    "rate",
    "increase",
    "changes",
    "histogram_quantile",
    "sum",
    "max",
    "label_values",
    "count",
}
_WITH_LABELS = {"by", "on", "group_left"}
_FROM_PROMETHEUS = {"instance", "job"}
_VARIABLES = {
    "label_values(inflight_engine_up, model)",
    "label_values(inflight_server_ready, instance)",
}


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    """All PromQL in a dashboard."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def labels_of(name: str) -> set[str]:
    """The labels of a series."""
    family = next(one for one in (*FAMILIES, *SERVER_FAMILIES) if name in _names(one))
    common = () if family in SERVER_FAMILIES else LABELS
    return {*common, *family.labels, *(["le"] if name.endswith("_bucket") else [])}


def _names(family: Family) -> set[str]:
    return {family.name + suffix for suffix in ("", "_bucket", "_sum", "_count")}


def parse(query: str) -> tuple[list[tuple[str, set[str]]], set[str]]:
    """The selectors of a query, each with the labels that it matches, and the labels that it
    groups or joins by.

    Raises:
        ValueError: it has unknown characters or unbalanced brackets.
    """
    tokens = re.findall(
        r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[A-Za-z_:][A-Za-z0-9_:]*|[0-9.]+|=~|!=|[-+*/(){},=<>]', query
    )
    if "".join(tokens) != re.sub(r"\s+", "", query):
        raise ValueError(f"unknown characters in {query!r}")
    for left, right in ("()", "{}"):
        if tokens.count(left) != tokens.count(right):
            raise ValueError(f"unbalanced {left}{right} in {query!r}")
    selectors: list[tuple[str, set[str]]] = []
    grouped: set[str] = set()
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token in _WITH_LABELS:
            end = tokens.index(")", index)
            grouped |= {one for one in tokens[index:end] if one not in "(,"}
            index = end + 1
        elif re.match("[A-Za-z_]", token) and token not in _FUNCTIONS:
            matched: set[str] = set()
            if tokens[index : index + 1] == ["{"]:
                end = tokens.index("}", index)
                matched = {one for one in tokens[index:end] if re.match("[a-z]", one)}
                index = end + 1
            selectors.append((token, matched))
    return selectors, grouped


def test_there_are_dashboards():
    names = [path.stem for path in DASHBOARDS]
    assert names == ["fleet", "kv", "latency", "overview", "speculation"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_queries_name_metrics_and_labels_that_exist(path: Path) -> None:
    known = set(published()) | {one.name for one in SERVER_FAMILIES}
    for query in queries(load(path)):
        if query.startswith("label_values"):
            assert query in _VARIABLES
            continue
        selectors, grouped = parse(query)
        assert selectors, query
        allowed: set[str] = set(_FROM_PROMETHEUS)
        for name, matched in selectors:
            assert name in known, f"{query}: {name} is not published"
            assert matched <= labels_of(name) | _FROM_PROMETHEUS, query
            allowed |= labels_of(name)
        assert grouped <= allowed, query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_matched_value_exists(path: Path) -> None:
    values = {
        (label, value)
        for family in FAMILIES
        for place, label in enumerate(family.labels)
        for value in (one[place] for one in family.values)
    } | {("le", repr(float(bound))) for family in FAMILIES for bound in family.bounds}
    for query in queries(load(path)):
        for label, value in re.findall(r'(\w+)="([^"]*)"', query):
            assert (label, value) in values, query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in load(path)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_parser_refuses_what_does_not_exist() -> None:
    selectors, grouped = parse('sum by (le, model) (rate(a_bucket{model=~"$model"}[5m])) / b')
    assert selectors == [("a_bucket", {"model"}), ("b", set())]
    assert grouped == {"le", "model"}
    with pytest.raises(ValueError, match="unbalanced"):
        parse("rate(a[5m]")
