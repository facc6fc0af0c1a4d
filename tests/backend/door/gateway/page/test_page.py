"""The files of the chat page, and their headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from gateway import Gateway, a_gateway
from keys import desk

SOURCES = files("inflight.door.gateway.page")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """With keys; the page needs none."""
    folder = tmp_path_factory.mktemp("page")
    with desk(folder) as keys, a_gateway(folder, "--page", *keys.options) as running:
        yield running


def assets(gateway: Gateway) -> list[str]:
    """The paths that the page names."""
    _, _, body = gateway.ask("GET", "/")
    return re.findall(r'(?:href|src)="(/[^"]+)"', body.decode())


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_the_page_forbids_what_it_does_not_need(gateway: Gateway, path: str) -> None:
    status, headers, body = gateway.ask("GET", path)
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(one.split(" ", 1) for one in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[one] for one in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert {policy[f"{one}-src"] for one in ("script", "style", "connect", "img")} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    # An inline script, style or handler would be blocked.
    text = body.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)|javascript:", text)


def test_the_page_names_no_other_host() -> None:
    for source in SOURCES.iterdir():
        if source.name.endswith((".html", ".css", ".js")):
            found = re.findall(
                r"(?:src|href|url|from|import)[=(\s]+[\"']?https?:", source.read_text()
            )
            assert found == [], source.name


def test_assets_are_cached_for_good_and_the_page_is_revalidated(gateway: Gateway) -> None:
    _, headers, _ = gateway.ask("GET", "/")
    assert headers["cache-control"] == "no-cache"
    paths = assets(gateway)
    assert {path.rpartition("/")[2] for path in paths} == {"app.js", "style.css", "icon.svg"}
    for path in paths:
        status, headers, body = gateway.ask("GET", path)
        assert status == 200
        assert "immutable" in headers["cache-control"]
        assert body == SOURCES.joinpath(path.rpartition("/")[2]).read_bytes()


def test_a_file_that_the_browser_has_is_not_sent_again(gateway: Gateway) -> None:
    for path in ("/", *assets(gateway)):
        tag = gateway.ask("GET", path)[1]["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            status, headers, body = gateway.ask("GET", path, If_None_Match=known)
            assert (status, headers["etag"], body) == (304, tag, b"")
        assert gateway.ask("GET", path, If_None_Match='"other"')[0] == 200


def test_each_module_is_served_under_the_name_by_which_it_is_imported(gateway: Gateway) -> None:
    folder = assets(gateway)[0].rpartition("/")[0]
    imported = {
        name
        for source in SOURCES.iterdir()
        if source.name.endswith(".js")
        for name in re.findall(r'from "\./([^"]+)"', source.read_text())
    }
    assert "markdown.js" in imported
    for name in imported:
        status, headers, _ = gateway.ask("GET", f"{folder}/{name}")
        assert (status, headers["content-type"]) == (200, "text/javascript; charset=utf-8")


def test_only_the_page_needs_no_key(gateway: Gateway) -> None:
    folder = assets(gateway)[0].rpartition("/")[0]
    for path in ("/v1/models", f"{folder}/page.py", f"{folder}/other.js", "/ui/other", "/ui/"):
        assert gateway.ask("GET", path)[0] == 401
    assert gateway.ask("POST", "/")[0] == 401
    assert gateway.ask("HEAD", "/")[0] == 200


def test_without_the_option_there_is_no_page(tmp_path: Path) -> None:
    with a_gateway(tmp_path) as running:
        for path in ("/", "/ui"):
            status, _, body = running.ask("GET", path)
            assert status == 404
            assert b"not_found" in body
