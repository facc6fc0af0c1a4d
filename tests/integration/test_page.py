"""The chat page of `inflight serve` in Chromium, with SmolLM2 behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from chromium import Tab, a_browser
from supervised import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.integration

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture
def tab(browser: Browser, gateway: Serving) -> Iterator[Tab]:
    match = re.search(r"^chat\s+(http://\S+)$", gateway.shown.read_text(), re.MULTILINE)
    assert match is not None
    found = Tab(browser, match[1])
    found.wait_until_usable()
    found.page.fill("[name=temperature]", "0")
    yield found
    assert {url.split("/")[2] for url in found.requests} == {match[1].split("/")[2]}
    assert found.complaints == []
    found.context.close()


def stats_of(tab: Tab) -> str:
    """Of the last answer, in one line."""
    return tab.page.locator(".stats").last.inner_text().replace("\n", " ")


def test_a_conversation_by_the_keyboard(tab: Tab) -> None:
    assert tab.page.input_value("#model") == MODEL
    tab.page.fill("[name=max_tokens]", "24")
    first = tab.ask("What is the capital of France?")
    assert "Paris" in first
    stats = stats_of(tab)
    assert re.search(r"TTFT [\d.]+ m?s speed [\d.]+ tokens/s prompt \d+ tokens", stats)
    tokens = re.search(r"completion (\d+) tokens", stats)
    assert tokens is not None and 1 < int(tokens[1]) <= 24
    tab.send("And of Italy?")
    tab.page.wait_for_function("document.querySelectorAll('.assistant').length === 2")
    assert tab.answer()
    # The conversation so far is in the prefix cache.
    cached = re.search(r"prompt (\d+) tokens \((\d+) cached\)", stats_of(tab))
    assert cached is not None and 0 < int(cached[2]) < int(cached[1])
    tab.page.reload()
    tab.wait_until_usable()
    assert tab.page.locator("article").count() == 4
    assert tab.page.locator(".assistant > .text").first.inner_text() == first


def test_a_seed_gives_the_same_answer_again(tab: Tab) -> None:
    for name, value in {"temperature": "1", "seed": "5", "max_tokens": "12"}.items():
        tab.page.fill(f"[name={name}]", value)
    first = tab.ask("Tell me a story.")
    tab.page.click("[aria-label='Regenerate answer']")
    assert tab.answer() == first
    tab.page.fill("[name=seed]", "6")
    tab.page.click("[aria-label='Regenerate answer']")
    assert tab.answer() != first


def test_escape_ends_the_request_in_the_engine(tab: Tab, gateway: Serving) -> None:
    tab.send("Count from 1 to 1000, one number per line, and leave none out.")
    tab.page.wait_for_selector(".assistant > .text > *")
    tab.press("Escape")
    tab.wait_until_complete()
    assert "stopped by you" in stats_of(tab)
    gateway.wait_until(lambda: gateway.stats().num_running == 0)


def test_what_the_server_refuses_is_shown_with_its_reason(tab: Tab) -> None:
    tab.page.fill("#input", "word " * 9000)
    tab.page.focus("#input")
    tab.press("Enter")
    tab.wait_until_complete()
    assert "maximum context length is" in tab.page.inner_text(".error[role=alert]")
