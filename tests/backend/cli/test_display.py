"""Text is shown verbatim, even if it looks like markup."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from inflight.cli.display import Display
from inflight.deploy.tritonserver.endpoints import Endpoints
from inflight.ipc.frames import Loading
from inflight.ipc.health import Health

ODD = "[/b] a [bold]path[/x]"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_texts_are_not_taken_for_markup(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one shows no progress
    shown = io.StringIO()
    display = Display(Console(file=shown, force_terminal=is_terminal, width=200, color_system=None))
    with display.loading() as show:
        show(ODD, Loading(ODD, 0.5))
    listens = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    display.ready(Endpoints(*listens), ["chat", ODD], {ODD: ODD}, Path("/tmp") / ODD)
    display.error(ODD)
    text = shown.getvalue()
    assert f"chat, {ODD}" in text
    assert f"device   {ODD}\n" in text
    assert f"log      /tmp/{ODD}" in text
    assert f"error: {ODD}" in text
    assert f"{ODD}: {ODD}" in text


def test_who_waits_for_ready_finds_the_addresses_in_the_same_write() -> None:
    class Writes(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    written: list[str] = []
    endpoints = Endpoints("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    Display(Console(file=Writes(), width=200)).ready(endpoints, ["chat"], {}, Path("log"))
    assert len(written) == 1
    assert written[0].startswith("READY\n") and written[0].endswith("Ctrl-C drains and stops\n")
    assert all(one in written[0] for one in (endpoints.http, endpoints.grpc, endpoints.metrics))


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        ({"llm": "CPU: torch sees no GPU"}, "device   CPU: torch sees no GPU\n"),
        ({"one": "GPU", "two": "GPU"}, "device   GPU\n"),
        ({"one": "GPU", "two": "CPU"}, "device   one: GPU; two: CPU\n"),
        ({}, ""),
    ],
)
def test_devices_are_shown_once_for_all_models_on_them(devices: dict[str, str], shown: str) -> None:
    output = io.StringIO()
    Display(Console(file=output, width=200)).ready(
        Endpoints("1", "2", "3"), ["llm"], devices, Path("log")
    )
    assert shown in output.getvalue()
    assert ("device" in output.getvalue()) == bool(shown)


def test_a_server_that_becomes_unready_is_told_once() -> None:
    output = io.StringIO()
    display = Display(Console(file=output, width=200))
    broken = Health(is_live=True, is_ready=False, reason="the engine [of] llm was killed")
    for health in (broken, broken, Health(is_live=True, is_ready=True), broken):
        display.health(health)
    assert output.getvalue() == (
        "error: not ready: the engine [of] llm was killed\n"
        "ready again\n"
        "error: not ready: the engine [of] llm was killed\n"
    )


@pytest.mark.parametrize(("gateway", "row"), [("127.0.0.1:9", "http://127.0.0.1:9/v1"), ("", "")])
def test_the_gateway_is_shown_if_there_is_one(gateway: str, row: str) -> None:
    output = io.StringIO()
    Display(Console(file=output, width=200)).ready(
        Endpoints("1", "2", "3", gateway=gateway), ["llm"], {}, Path("log")
    )
    assert ("OpenAI" in output.getvalue()) == bool(row)
    assert row in output.getvalue()
