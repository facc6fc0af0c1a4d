"""The pages of a run and of a comparison."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from bench_reports import measured, random_level, record, report, steady_level
from inflight.cli.bench.serving.page import document
from inflight.cli.bench.serving.results.comparison import compare
from inflight.cli.bench.serving.results.figures import level
from inflight.cli.bench.serving.results.slo import parse

VOID = {"meta"}


class Checked(HTMLParser):
    """Fails if tags do not nest, and collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def run_page() -> str:
    slo = parse("ttft=60,itl=15")
    levels = [random_level(value, 0.004 * value, seed=value, slo=slo) for value in (1, 4, 16)]
    return document.of_run(report(*levels, command="inflight bench serve --model '<b>&'"))


def comparison_page() -> str:
    before, after = (report(random_level(4, itl)) for itl in (0.01, 0.02))
    return document.of_comparison(before, after, compare(before, after))


@pytest.mark.parametrize("make", [run_page, comparison_page])
def test_a_page_is_well_formed_and_fetches_nothing(make: Callable[[], str]) -> None:
    text = make()
    page = Checked(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not {"src", "href", "srcset", "action", "style"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?://|//|url\(|@import", text)


def test_it_suits_light_and_dark() -> None:
    assert "color-scheme: light dark" in run_page()
    assert "prefers-color-scheme: dark" in run_page()


def test_a_run_has_its_charts_tables_and_origin() -> None:
    page = Checked(run_page())
    assert page.tags.count("svg") == 7
    labels = {value for name, value in page.attributes if name == "aria-label"}
    assert "Time to first token over load" in labels
    assert "Throughput over inter-token latency" in labels
    assert "Inter-token latency: distribution" in labels
    assert {"0123abc", "a CPU, 2 cores", "inflight bench serve --model '<b>&'"} <= set(page.texts)
    assert page.texts.count("concurrency 16") >= 6  # rows of both tables and legends


def test_the_fastest_level_is_marked_where_it_belongs() -> None:
    """The place of a point follows from its value and the axis."""
    text = run_page()
    chart = text[text.index('aria-label="Inter-token latency over load"') :]
    places = [
        (float(x), float(y))
        for x, y in re.findall(r'<circle [^>]*cx="([\d.]+)" cy="([\d.]+)"', chart)
    ][:3]
    (x1, y1), (x4, y4), (x16, y16) = places
    assert x4 - x1 == pytest.approx(x16 - x4, abs=0.2)  # by logarithm
    assert y1 > y4 > y16  # later is higher
    assert (y1 - y4) / (y4 - y16) == pytest.approx(3 / 12, rel=0.1)


def test_a_comparison_shows_differences_and_both_distributions() -> None:
    page = Checked(comparison_page())
    assert {"before", "after", "worse", "95 % interval"} <= set(page.texts)
    assert page.tags.count("svg") == 3


def test_doubtful_figures_are_marked() -> None:
    late = level("rate", 2, measured(record(0.0, (0.1, 1)), lag_ms=9.0), None, None)
    failed = level("rate", 3, measured(record(0.0, error="Unavailable")), None, None)
    page = Checked(document.of_run(report(late, failed)))
    text = "".join(page.texts)
    assert "event loop was late by 9.0 ms" in text
    assert "rate 3/s: 1 x Unavailable: what Unavailable says" in text


def test_rates_with_an_slo_are_charts_of_latency_and_goodput_over_the_rate() -> None:
    slo = parse("ttft=500,tpot=30")
    levels = [steady_level(rate, ttft_s, slo) for rate, ttft_s in ((8, 0.9), (2, 0.1), (4, 0.3))]
    page = document.of_run(report(*levels, slo=str(slo)))
    found = Checked(page)
    titles = [value for name, value in found.attributes if name == "aria-label"]
    assert titles == [
        "Time to first token over load",
        "Time per output token of a request over load",
        "Inter-token latency over load",
        "Time to the last token over load",
        "Goodput over load",
        "Output over load",
    ]
    assert {"p50", "p95", "p99", "SLO 500 ms", "SLO 30 ms", "goodput"} <= set(found.texts)
    assert "highest rate that meets p99 of ttft=500 and tpot=30 ms: 4/s" in page
