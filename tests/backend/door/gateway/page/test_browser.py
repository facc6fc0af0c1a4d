"""The chat page in Chromium, in front of a Triton that plays scripts."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from chromium import Tab, a_browser
from gateway import DROP, UNTIL_LEFT, Gateway, a_gateway, delta, end
from keys import desk
from page_markdown import a_text
from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MODEL = "org/tiny-chat"
HOSTILE = """\
<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 1"> <svg/onload=window.hacked=1>
[link](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>)
![image](https://example.invalid/leak.png) <https://example.invalid>

```"><script>window.hacked = 1</script>
</code></pre><script>window.hacked = 1</script>
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with a_gateway(tmp_path_factory.mktemp("page"), "--page") as running:
        yield running


def url_of(gateway: Gateway) -> str:
    return f"http://127.0.0.1:{gateway.port}/"


@pytest.fixture
def tab(browser: Browser, gateway: Gateway) -> Iterator[Tab]:
    """A page with a model. At the end it has asked no other host, and has not complained."""
    found = Tab(browser, url_of(gateway), viewport={"width": 1280, "height": 800})
    found.choose(MODEL)
    yield found
    found.context.close()
    assert {url.split("/")[2] for url in found.requests} == {f"127.0.0.1:{gateway.port}"}
    assert found.complaints == []


def sent_messages(gateway: Gateway) -> list[tuple[str, str]]:
    """Of the only request: roles and contents."""
    return [(one["role"], one["content"]) for one in json.loads(gateway.triton.sent["messages"])]


def test_an_answer_appears_while_it_is_generated(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("The first"), UNTIL_LEFT)
    tab.send("Hello")
    tab.page.wait_for_selector(".assistant .text:has-text('The first')")
    assert tab.page.get_attribute("#log", "aria-busy") == "true"
    assert tab.page.is_visible("#stop") and not tab.page.is_visible("#send")


@pytest.mark.parametrize("how", ["Escape", "the button"])
def test_stopping_ends_the_request_and_keeps_the_text(tab: Tab, gateway: Gateway, how: str) -> None:
    gateway.triton.plays(delta("The first"), UNTIL_LEFT)
    num_lost = gateway.triton.num_lost
    tab.send("Hello")
    tab.page.wait_for_selector(".assistant .text:has-text('The first')")
    if how == "Escape":
        tab.press("Escape")
    else:
        tab.page.click("#stop")
    assert tab.answer() == "The first"
    assert "stopped by you" in tab.page.inner_text(".stats")
    assert tab.page.inner_text("#status") == "Stopped."
    assert tab.focused == "input"
    wait_until(lambda: gateway.triton.num_lost > num_lost)


def test_statistics_are_those_of_the_usage(tab: Tab, gateway: Gateway) -> None:
    stats = json.dumps({"timing": {"num_cached_tokens": 3}})
    go_on = threading.Event()
    script = [delta("Hi", num_output_tokens=1), go_on, delta(" you", num_output_tokens=4000)]
    gateway.triton.plays(*script, end("length", draft_stats=stats))
    tab.page.clock.install()
    tab.send("Hello")
    tab.page.wait_for_selector(".assistant .text:has-text('Hi')")
    tab.page.clock.fast_forward(1_000_000)
    go_on.set()
    assert tab.answer() == "Hi you"
    text = tab.page.inner_text(".stats").replace("\n", " ")
    assert "prompt 5 tokens (3 cached)" in text
    assert "completion 4001 tokens" in text
    assert "cut off by max tokens" in text
    assert re.search(r"TTFT \d+ ms|TTFT \d+\.\d\d s", text)
    # 4,000 tokens after the first, in 1,000 s and what the test itself takes: up to 12 s.
    assert "speed 4.0 tokens/s" in text


def test_sampling_is_what_the_panel_says(tab: Tab, gateway: Gateway) -> None:
    fields = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "11", "seed": "3"}
    for name, value in fields.items():
        tab.page.fill(f"[name={name}]", value)
    tab.page.fill("[name=system]", "Be brief.")
    gateway.triton.plays(delta("Hi"), end())
    tab.ask("Hello")
    sent = gateway.triton.sent
    assert {name: str(sent[name]) for name in fields} == fields
    assert sent_messages(gateway) == [("system", "Be brief."), ("user", "Hello")]


def test_what_the_panel_leaves_empty_is_up_to_the_server(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    tab.ask("Hello")
    assert {"top_p", "top_k", "seed"}.isdisjoint(gateway.triton.sent)
    assert sent_messages(gateway) == [("user", "Hello")]


def test_a_value_that_is_not_allowed_is_not_sent(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi"), end())
    tab.page.fill("[name=temperature]", "9")
    tab.send("Hello")
    assert tab.focused == "temperature"
    assert gateway.triton.requests == []
    assert tab.page.input_value("#input") == "Hello"


def test_a_conversation_survives_a_reload_and_goes_on(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("One **two**"), end())
    tab.ask("First")
    tab.page.fill("[name=temperature]", "0.5")
    tab.page.reload()
    tab.wait_until_usable()
    assert tab.page.input_value("#model") == MODEL
    assert tab.page.input_value("[name=temperature]") == "0.5"
    assert tab.answer() == "One two"
    gateway.triton.plays(delta("Three"), end())
    assert tab.ask("Second") == "Three"
    said = [("user", "First"), ("assistant", "One **two**"), ("user", "Second")]
    assert sent_messages(gateway) == said


def test_a_reload_keeps_what_has_arrived(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("The first"), UNTIL_LEFT)
    tab.send("Hello")
    tab.page.wait_for_selector(".assistant .text:has-text('The first')")
    tab.page.reload()
    tab.wait_until_usable()
    assert tab.answer() == "The first"
    assert tab.page.is_visible("[aria-label='Regenerate answer']")


def test_a_new_chat_is_empty_and_the_former_can_be_restored(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("One"), end())
    tab.ask("First")
    tab.page.click("#new")
    assert tab.page.locator("article").count() == 0
    assert tab.focused == "input"
    tab.page.click("#restore")
    assert tab.page.locator(".user > .text").all_inner_texts() == ["First"]
    assert tab.answer() == "One"


def test_a_new_chat_ends_the_answer_under_way(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("The first"), UNTIL_LEFT)
    tab.send("Hello")
    tab.page.wait_for_selector(".assistant .text:has-text('The first')")
    tab.page.click("#new")
    gateway.triton.plays(delta("Another"), end())
    assert tab.ask("Again") == "Another"
    assert sent_messages(gateway) == [("user", "Again")]


def test_an_edited_question_replaces_what_followed(tab: Tab, gateway: Gateway) -> None:
    for text in ("One", "Two"):
        gateway.triton.plays(delta(text), end())
        tab.ask(f"Question {text}")
    tab.page.locator("[aria-label='Edit message']").first.click()
    tab.press("Control+a")
    tab.page.keyboard.type("Another")
    gateway.triton.plays(delta("Three"), end())
    tab.press("Enter")
    assert tab.answer() == "Three"
    assert sent_messages(gateway) == [("user", "Another")]
    assert tab.page.locator("article").count() == 2


def test_an_edit_is_cancelled_by_escape(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("One"), end())
    tab.ask("First")
    tab.page.click("[aria-label='Edit message']")
    tab.press("x", "Escape")
    assert tab.focused == "Edit"
    assert tab.page.inner_text(".user > .text") == "First"


def test_an_answer_is_regenerated_in_its_place(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("One"), end())
    tab.ask("First")
    gateway.triton.plays(delta("Two"), end())
    tab.page.click("[aria-label='Regenerate answer']")
    tab.page.wait_for_selector(".assistant .text:has-text('Two')")
    assert tab.answer() == "Two"
    assert sent_messages(gateway) == [("user", "First")]
    assert tab.page.locator("article").count() == 2


def test_an_error_is_shown_with_the_servers_message(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.refusal = (503, "the queue is full; retry later")
    tab.send("Hello")
    tab.wait_until_complete()
    shown = tab.page.inner_text(".error[role=alert]")
    assert "the queue is full; retry later" in shown
    assert "status 503" in shown and re.search(r"request [0-9a-f]{16}", shown)
    gateway.triton.plays(delta("Hi"), end())
    tab.page.click("[aria-label='Regenerate answer']")
    tab.page.wait_for_selector(".assistant .text:has-text('Hi')")
    assert not tab.page.is_visible(".error")


def test_a_model_without_chats_is_an_error_of_the_server(tab: Tab) -> None:
    tab.page.select_option("#model", "base")
    tab.send("Hello")
    tab.wait_until_complete()
    assert "no chat template" in tab.page.inner_text(".error")


def test_an_answer_that_breaks_off_keeps_its_text(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("The first"), DROP)
    assert tab.ask("Hello") == "The first"
    assert tab.page.inner_text(".error p") != ""


def test_reasoning_is_apart(tab: Tab, gateway: Gateway) -> None:
    tab.page.select_option("#model", "thinker")
    gateway.triton.plays(delta("<think>Hm, *so*."), delta("</think>The answer"), end())
    assert tab.ask("Hello").strip() == "The answer"
    tab.page.click("summary")
    assert tab.page.inner_text(".reasoning .text").strip() == "Hm, so."


def test_code_is_copied(tab: Tab, gateway: Gateway) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    gateway.triton.plays(delta("Look:\n```python\nx = 1\n\ny = 2\n```\n"), end())
    tab.ask("Hello")
    tab.page.click("[aria-label='Copy code']")
    tab.page.wait_for_selector("figcaption :text('Copied')")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "x = 1\n\ny = 2"


def test_the_output_of_a_model_is_never_html(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(*map(delta, re.findall(".{1,5}", HOSTILE, re.DOTALL)), end())
    text = tab.ask(HOSTILE.replace("\n", " "))
    assert "<script>window.hacked = 1</script>" in text
    assert tab.page.locator("#log :is(script, img, svg, iframe, style)").count() == 0
    hrefs = tab.page.locator("#log a").evaluate_all("all => all.map(({href}) => href)")
    assert set(hrefs) <= {"https://example.invalid/leak.png", "https://example.invalid/"}
    assert tab.page.evaluate("window.hacked") is None


def test_random_texts_become_harmless_elements(tab: Tab) -> None:
    generator = random.Random(1)
    texts = [a_text(generator) for _ in range(500)]
    (url,) = {one for one in tab.requests if one.endswith("/markdown.js")}
    found = tab.page.evaluate(
        """async ([url, texts]) => {
            const { show } = await import(url);
            const found = new Set();
            for (const text of texts) {
                const element = document.createElement("div");
                show(element, text.slice(0, text.length / 2), () => {});
                show(element, text, () => {});
                const whole = document.createElement("div");
                show(whole, text, () => {});
                if (element.innerHTML !== whole.innerHTML) found.add("differs: " + text);
                for (const { tagName, attributes } of element.querySelectorAll("*")) {
                    found.add(tagName.toLowerCase());
                    for (const { name, value } of attributes) {
                        const scheme = value.split(":")[0].toLowerCase() + ":";
                        found.add(name === "href" ? scheme : "@" + name);
                    }
                }
            }
            return [...found];
        }""",
        [url, texts],
    )
    tags = "a blockquote button code del div em figcaption figure h3 h4 h5 h6 hr li ol p pre span"
    table = "strong table tbody td th thead tr ul"
    attributes = (
        "@aria-label @class @rel @start @tabindex @target @title @type http: https: mailto:"
    )
    assert set(found) <= set(f"{tags} {table} {attributes}".split())
    assert {"a", "code", "del", "em", "figure", "ol", "table", "ul"} <= set(found)


def test_the_policy_refuses_html_and_foreign_hosts(browser: Browser, gateway: Gateway) -> None:
    tab = Tab(browser, url_of(gateway))
    refused = "error => error.name"
    for action in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.createElement('script').text = 'window.hacked = 1'",
        "setTimeout('window.hacked = 1')",
        "await fetch('https://example.invalid/')",
    ):
        script = f"(async () => {{ {action} }})().then(() => 'allowed', {refused})"
        assert tab.page.evaluate(script) in ("TypeError", "EvalError"), action
    tab.context.close()


def test_the_keyboard_is_enough(tab: Tab, gateway: Gateway) -> None:
    tab.page.reload()
    tab.wait_until_usable()
    assert tab.focused == "input"
    tab.page.keyboard.type("One")
    tab.press("Shift+Enter")
    tab.page.keyboard.type("Two")
    assert tab.page.input_value("#input") == "One\nTwo"
    gateway.triton.plays(delta("Hi\n```\nx\n```"), end())
    tab.press("Enter")
    tab.answer()
    assert sent_messages(gateway) == [("user", "One\nTwo")]
    order = []
    for _ in range(30):
        order.append(tab.focused)
        outline = tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", tab.focused
        tab.press("Shift+Tab")
        if tab.focused == "BODY":
            break
    assert order[0] == "input"
    ours = ["log", "Copy", "Edit", "Copy", "x", "Copy", "Regenerate", "input"]
    front = ["Skip to the message", "model", "new", "toggle"]
    assert order[::-1][: len(front) + len(ours)] == [*front, *ours]


def test_escape_leaves_the_settings(tab: Tab) -> None:
    tab.page.focus("[name=top_p]")
    tab.press("Escape")
    assert tab.focused == "toggle"
    assert not tab.page.is_visible("#settings")
    tab.press("Enter")
    assert tab.page.is_visible("#settings")
    assert tab.page.get_attribute("#toggle", "aria-expanded") == "true"


def test_each_control_has_a_name(tab: Tab, gateway: Gateway) -> None:
    gateway.triton.plays(delta("Hi\n```\nx\n```\n|a|\n|-|\n"), end())
    tab.ask("Hello")
    nameless = tab.page.locator("button, input, select, textarea").evaluate_all(
        "all => all.filter((one) => !one.ariaLabel && !one.textContent.trim()"
        " && !one.labels?.length).map((one) => one.outerHTML)"
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(tab: Tab, gateway: Gateway, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: at least 4.5 to 1."""
    tab.page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    tab.page.select_option("[name=theme]", scheme)
    gateway.triton.plays(delta("Hi [l](https://a.b) `c`\n> q\n```py\nx\n```\n"), end("length"))
    tab.ask("Hello")
    found = tab.page.evaluate(
        """() => {
            const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            const luminance = (colour) => {
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => {
                    const value = one / 255;
                    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const behind = (element) => {
                for (let one = element; one; one = one.parentElement) {
                    const colour = getComputedStyle(one).backgroundColor;
                    if (colour !== "rgba(0, 0, 0, 0)") return colour;
                }
            };
            return [...document.querySelectorAll("body *")].filter((one) =>
                one.checkVisibility() && !one.disabled &&
                [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
            ).map((one) => {
                const pair = [getComputedStyle(one).color, behind(one)].map(luminance);
                const [dark, light] = pair.sort((a, b) => a - b);
                return [one.outerHTML.slice(0, 80), (light + 0.05) / (dark + 0.05)];
            });
        }"""
    )
    assert len(found) > 25
    assert [one for one in found if one[1] < 4.5] == []
    is_dark = tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (is_dark == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("width", [320, 700, 1600])
def test_nothing_is_wider_than_the_window(tab: Tab, gateway: Gateway, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 600})
    wide = "w" * 300
    text = f"{wide} `{wide}`\n```\n{wide}\n```\n| {wide} | b |\n|---|---|\n\nhttps://a.b/{wide}"
    gateway.triton.plays(delta(text), end())
    tab.ask(wide)
    for selector in ("html", "body", "#log", ".bar", "#composer"):
        scrolled, shown = tab.page.eval_on_selector(
            selector, "one => [one.scrollWidth, one.clientWidth]"
        )
        assert scrolled <= shown, selector
    assert tab.page.locator("#input").bounding_box() is not None


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    """A gateway with keys, and one of them."""
    folder = tmp_path_factory.mktemp("keys")
    with desk(folder) as keys, a_gateway(folder, "--page", *keys.options) as running:
        yield running, keys.issue()


def test_a_key_is_asked_for_and_kept_until_the_tab_is_closed(
    browser: Browser, guarded: tuple[Gateway, str]
) -> None:
    gateway, key = guarded
    tab = Tab(browser, url_of(gateway))
    for attempt, note in (("sk-wrong", "requires an API key"), (key, "does not accept this key")):
        tab.page.wait_for_selector(f"dialog[open] :text('{note}')")
        assert tab.focused == "key"
        tab.page.keyboard.type(attempt)
        tab.press("Enter")
    tab.choose(MODEL)
    gateway.triton.plays(delta("Hi"), end())
    assert tab.ask("Hello") == "Hi"
    stored = "JSON.stringify(localStorage)", "JSON.stringify(sessionStorage)"
    lasting, fleeting = map(tab.page.evaluate, stored)
    assert key not in lasting and key in fleeting
    assert not any(key in url for url in tab.requests)
    tab.page.reload()
    tab.wait_until_usable()
    assert not tab.page.is_visible("dialog")
    tab.context.close()


def test_a_key_that_is_revoked_meanwhile_is_asked_for_again(
    browser: Browser, guarded: tuple[Gateway, str]
) -> None:
    gateway, key = guarded
    tab = Tab(browser, url_of(gateway))
    tab.page.wait_for_selector("dialog[open]")
    tab.page.keyboard.type(key)
    tab.press("Enter")
    tab.choose(MODEL)
    answers = itertools.cycle([{"error": {"message": "the key has expired", "code": "x"}}])
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=401, json=next(answers)),
    )
    tab.send("Hello")
    tab.page.wait_for_selector("dialog[open]")
    assert "the key has expired" in tab.page.inner_text(".error")
    tab.context.close()


def test_a_server_that_is_not_ready_is_tried_again(browser: Browser, gateway: Gateway) -> None:
    tab = Tab(browser, "about:blank")
    answer = {"error": {"message": "the engine is starting", "code": "x"}}
    tab.page.route("**/v1/models", lambda route: route.fulfill(status=503, json=answer))
    tab.page.goto(url_of(gateway))
    assert "the engine is starting" in tab.page.inner_text("#banner[role=alert] >> visible=true")
    assert tab.page.is_disabled("#send")
    tab.page.unroute("**/v1/models")
    tab.page.click("text=Try again")
    tab.wait_until_usable()
    assert not tab.page.is_visible("#banner")
    tab.context.close()
