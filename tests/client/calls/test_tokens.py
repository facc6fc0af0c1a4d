"""Token ids of texts and chats, and their text."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, inferred, strings
from inflight_client import InvalidRequest, Message, ModelDescription, ServerError

Use = Callable[..., Any]


def ids(call: Call) -> Iterator[Any]:
    yield inferred(("input_ids", "INT32", [3], struct.pack("<3i", 5, 6, 7)))


def test_a_text_is_tokenized(use: Use) -> None:
    with fake_triton.serve(ids) as server:
        action = lambda client: client.tokenize("Hi", add_special_tokens=False)  # noqa: E731
        assert use(server.url, action, version=2) == [5, 6, 7]
        (call,) = server.calls
    assert (call.request.model_name, call.request.model_version) == ("tokenizer", "2")
    assert call.input_names() == ["text_input", "add_special_tokens"]
    assert call.input("text_input") == ("BYTES", [1], b"\2\0\0\0Hi")
    assert call.input("add_special_tokens") == ("BOOL", [1], b"\0")


def test_errors_of_a_prompt_are_errors_of_the_call(use: Use) -> None:
    """A tokenizer that is asked for all outputs may return the error as one of them."""
    with fake_triton.serve(ids) as server:
        use(server.url, lambda client: client.tokenize("Hi"))
        (call,) = server.calls
    assert [output.name for output in call.request.outputs] == ["input_ids"]


def test_a_chat_is_tokenized_through_its_template(use: Use) -> None:
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with fake_triton.serve(ids) as server:
        found = use(
            server.url,
            lambda client: client.tokenize(
                messages, tools=tools, chat_template_kwargs={"x": 1}, add_generation_prompt=False
            ),
        )
        (call,) = server.calls
    assert found == [5, 6, 7]
    assert call.request.model_name == "chat_tokenizer"
    for name, value in (
        ("messages", messages),
        ("tools", tools),
        ("chat_template_kwargs", {"x": 1}),
    ):
        assert json.loads(call.input(name)[2][4:]) == value
    assert call.input("add_generation_prompt") == ("BOOL", [1], b"\0")


def test_options_of_chats_are_not_those_of_texts(use: Use) -> None:
    for action, message in (
        (lambda client: client.tokenize("Hi", tools=[]), "tools is not an option; allowed: add_s"),
        (lambda client: client.tokenize([], add_special_tokens=True), "add_special_tokens is not"),
        (lambda client: client.tokenize("Hi", max_tokens=1), "max_tokens is not an option"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            use("127.0.0.1:1", action)


def test_token_ids_become_text(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield inferred(("text_output", "BYTES", [1, 1], strings("Hé")))

    with fake_triton.serve(script) as server:
        assert use(server.url, lambda client: client.detokenize([5, 6])) == "Hé"
        (call,) = server.calls
    assert call.request.model_name == "detokenizer"
    assert call.input("detokenize_ids") == ("INT32", [1, 2], struct.pack("<2i", 5, 6))
    state = struct.pack("<6q", 2, 0, 0, 1, 0, 0)
    assert call.input("detokenize_state") == ("INT64", [1, 6], state)


def test_no_ids_are_no_text(use: Use) -> None:
    assert use("127.0.0.1:1", lambda client: client.detokenize([])) == ""


def test_a_response_without_a_text_is_the_servers_fault(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield inferred()

    with (
        fake_triton.serve(script) as server,
        pytest.raises(ServerError, match="text_output has 0 values"),
    ):
        use(server.url, lambda client: client.detokenize([1]))


@pytest.mark.parametrize("wrong", [[1.5], ["a"], [2**31]])
def test_an_id_that_cannot_be_one_is_refused(use: Use, wrong: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"detokenize_ids: .* is not an integer"):
        use("127.0.0.1:1", lambda client: client.detokenize(wrong))


DESCRIPTION = {
    "model": "SmolLM2",
    "max_model_len": 2048,
    "vocab_size": 49152,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": None,
    "special_tokens": ["<s>", "</s>"],
    "added_later": 1,
}


def test_the_model_is_described(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield inferred(("description", "BYTES", [1], strings(json.dumps(DESCRIPTION))))

    with fake_triton.serve(script) as server:
        assert use(server.url, lambda client: client.describe()) == ModelDescription(
            "SmolLM2", 2048, 49152, "<s>", "</s>", None, ("<s>", "</s>")
        )
        (call,) = server.calls
    assert call.request.model_name == "tokenizer"
    assert call.input_names() == ["describe"]
    assert call.input("describe") == ("BOOL", [1], b"\1")
    assert [output.name for output in call.request.outputs] == ["description"]


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "x"}', None])
def test_a_description_that_cannot_be_read_is_the_servers_fault(use: Use, text: str | None) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield inferred(*([] if text is None else [("description", "BYTES", [1], strings(text))]))

    with (
        fake_triton.serve(script) as server,
        pytest.raises(ServerError, match="output description cannot be read"),
    ):
        use(server.url, lambda client: client.describe())
