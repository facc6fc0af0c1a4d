"""Chromium without a window, driven over the DevTools protocol."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_MS = 60_000
# It asks no other host for anything.
QUIET = [
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@contextlib.contextmanager
def a_browser() -> Iterator[Browser]:
    """Skips the test if there is none."""
    # The extra `browser` is optional, and only a system package brings Chromium. Without a browser,
    # tests/backend/door/gateway/page/test_page.py tests the page's files, headers and policy.
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(NAMES)} on PATH")
    with api.sync_playwright() as playwright:
        # Tests may run as root, for whom Chromium's sandbox does not work.
        browser = playwright.chromium.launch(
            executable_path=path, args=QUIET, chromium_sandbox=False
        )
        yield browser
        browser.close()


class Tab:
    """The chat page in a browser with an empty storage.

    Attributes:
        requests: URLs.
        complaints: errors and warnings of the page, violations of its policy included; those about
            a response's status, which the browser logs itself, are left out.
    """

    def __init__(self, browser: Browser, url: str, **options: object) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", self._requested)
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)

    def _logged(self, message: ConsoleMessage) -> None:
        is_status = message.text.startswith("Failed to load resource")
        if message.type in ("error", "warning") and not is_status:
            self.complaints.append(message.text)

    def wait_until_usable(self) -> None:
        self.page.wait_for_selector("#send:enabled")

    def choose(self, model: str) -> None:
        self.wait_until_usable()
        self.page.select_option("#model", model)

    def send(self, text: str) -> None:
        """By the keyboard."""
        self.page.focus("#input")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """The text of the answer, once it is complete."""
        self.send(text)
        return self.answer()

    def answer(self) -> str:
        """The last one, once it is complete."""
        self.wait_until_complete()
        return self.page.locator(".assistant > .text").last.inner_text()

    def wait_until_complete(self) -> None:
        self.page.wait_for_selector(".assistant")
        self.page.wait_for_selector("#log[aria-busy=false]")

    @property
    def focused(self) -> str:
        """The id, name or text of the element with the focus."""
        found: str = self.page.evaluate(
            "(({id, name, textContent, tagName}) => tagName === 'BODY' ? tagName"
            " : id || name || textContent)(document.activeElement)"
        )
        return found

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
