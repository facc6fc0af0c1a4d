"""Commands and messages of `inflight chat`; tests/backend/cli/test_app.py has the turns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, answer
from inflight.ipc import health
from inflight.ipc.health import Health
from inflight.ipc.runtime_folder import folder_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def hello(call: Call) -> Iterator[Any]:
    yield answer("Hello", "stop", num_output=1)


def chat(
    inflight: Run, stdin: str, *models: str, options: Sequence[str] = ()
) -> tuple[list[tuple[str, str]], str]:
    """Model and last message of each request, and what the command says; the server has `models`,
    as far as commands on this machine know."""
    with fake_triton.serve(hello) as server:
        if models:
            endpoints = {"grpc": server.url}
            found = Health(is_live=True, is_ready=True, models=list(models), endpoints=endpoints)
            health.write(folder_of(os.getpid()) / health.HEALTH_FILE, found)
        status, _, err = inflight("chat", "--url", server.url, *options, stdin=stdin)
        assert status == 0
        sent = [
            (call.request.model_name, json.loads(call.input("messages")[2][4:])[-1]["content"])
            for call in server.calls
        ]
    return sent, err


@pytest.mark.parametrize("command", ["/bye", "/quit", "/exit"])
def test_a_command_leaves(inflight: Run, command: str) -> None:
    assert chat(inflight, f"a\n{command}\nb\n")[0] == [("chat", "a")]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""first\nsecond"""', "first\nsecond"),
        ('"""\nfirst\n\n  second\n"""', "first\n\n  second"),
        ('"""one line"""', "one line"),
        ('"""\n/bye\n"""', "/bye"),
        ('say """this"""', 'say """this"""'),
    ],
)
def test_triple_quotes_hold_several_lines(inflight: Run, typed: str, message: str) -> None:
    assert chat(inflight, f"{typed}\nb\n")[0] == [("chat", message), ("chat", "b")]


def test_a_message_whose_quotes_are_not_closed_is_not_sent(inflight: Run) -> None:
    assert chat(inflight, 'a\n"""b\nc\n')[0] == [("chat", "a")]


def test_another_model_goes_on_with_the_conversation(inflight: Run) -> None:
    sent, err = chat(inflight, "a\n/model two_chat\nb\n")
    assert sent == [("chat", "a"), ("two_chat", "b")]
    assert err.endswith("model two_chat\n")


def test_the_prefix_of_a_model_is_enough(inflight: Run) -> None:
    assert "nope" in fake_triton.MISSING and "nope_chat" not in fake_triton.MISSING
    assert chat(inflight, "/model nope\na\n")[0] == [("nope_chat", "a")]
    assert chat(inflight, "a\n", options=("--model", "nope"))[0] == [("nope_chat", "a")]


def test_a_model_that_is_not_ready_changes_nothing(
    inflight: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_triton, "MISSING", ("gone", "gone_chat"))
    sent, err = chat(inflight, "/model gone\na\n")
    assert sent == [("chat", "a")]
    assert "model gone is not ready; /model lists the models" in err


def test_only_the_command_for_models_has_an_argument(inflight: Run) -> None:
    assert "/stats now is not a command" in chat(inflight, "/stats now\n")[1]


def test_models_of_the_server_are_listed(inflight: Run) -> None:
    _, err = chat(inflight, "/model\n", "chat", "generate", "llm", "two_chat", "two_llm")
    assert err.splitlines()[1:] == ["* chat", "  two_chat"]


def test_of_another_machines_server_only_the_model_in_use_is_known(inflight: Run) -> None:
    _, err = chat(inflight, "/model\n")
    assert err.splitlines()[1:] == ["* chat"]
