"""inflight's own ensembles; most of it is tested with the client."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

import fake_triton
from fake_triton import two_words
from inflight_client import InvalidRequest

Use = Callable[..., Any]
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_prompt_may_be_token_ids(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        use(server.url, lambda client: client.generate((5, 6), add_special_tokens=False))
        (call,) = server.calls
    assert call.input("prompt_token_ids") == ("INT32", [2], struct.pack("<2i", 5, 6))
    assert call.input("add_special_tokens") == ("BOOL", [1], b"\0")
    assert "text_input" not in call.input_names()


def test_a_chat_has_tools_and_template_variables(use: Use) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with fake_triton.serve(two_words) as server:
        use(
            server.url,
            lambda client: client.chat(
                MESSAGES,
                tools=tools,
                chat_template_kwargs={"enable_thinking": False},
                continue_final_message=True,
                max_tokens=3,
            ),
        )
        (call,) = server.calls
    assert json.loads(call.input("tools")[2][4:]) == tools
    assert json.loads(call.input("chat_template_kwargs")[2][4:]) == {"enable_thinking": False}
    assert call.input("continue_final_message") == ("BOOL", [1], b"\1")
    assert call.input("max_tokens") == ("INT32", [1], struct.pack("<i", 3))


def test_options_of_a_chat_are_not_those_of_a_prompt(use: Use) -> None:
    for action, name in (
        (lambda client: client.generate("Hi", tools=[]), "tools"),
        (lambda client: client.chat(MESSAGES, add_special_tokens=True), "add_special_tokens"),
    ):
        with pytest.raises(InvalidRequest, match=f"{name} is not an option"):
            use("127.0.0.1:1", action)
