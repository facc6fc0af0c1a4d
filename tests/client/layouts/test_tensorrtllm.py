"""The layout of tensorrtllm_backend, against a fake server that declares its models."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, streamed, strings
from inflight_client import Completion, InvalidRequest, ServerError

Use = Callable[..., Any]
LAYOUT = "tensorrtllm"


def response(text: str, num_output: int = 1, index: int | None = None) -> Any:
    outputs = [
        ("text_output", "BYTES", [1], strings(text)),
        ("num_input_tokens", "INT32", [1, 1], struct.pack("<i", 5)),
        ("num_output_tokens", "INT32", [1, 1], struct.pack("<i", num_output)),
        ("cum_log_probs", "FP32", [1, 1], struct.pack("<f", 0.0)),
    ]
    if index is not None:
        outputs.append(("sequence_index", "INT32", [1, 1], struct.pack("<i", index)))
    return streamed(*outputs)


def three_tokens(call: Call) -> Iterator[Any]:
    yield response("Hello", 2)
    yield response(" wörld")


def test_a_prompt_travels_as_tensors_of_a_batch_of_one(use: Use) -> None:
    with fake_triton.serve(three_tokens) as server:
        use(
            server.url,
            lambda client: client.generate(
                "Hi",
                max_tokens=7,
                min_length=2,
                temperature=0.5,
                seed=3,
                stop_words=["a", "bc"],
                n=1,
                guided_decoding_guide_type="json_schema",
                guided_decoding_guide={"type": "object"},
                return_finish_reason=True,
            ),
            layout=LAYOUT,
        )
        (call,) = server.calls
    assert call.request.model_name == "ensemble"
    assert {name: call.input(name) for name in call.input_names()} == {
        "text_input": ("BYTES", [1, 1], strings("Hi")),
        "stream": ("BOOL", [1, 1], b"\0"),
        "exclude_input_in_output": ("BOOL", [1, 1], b"\1"),
        "return_num_input_tokens": ("BOOL", [1, 1], b"\1"),
        "return_num_output_tokens": ("BOOL", [1, 1], b"\1"),
        "max_tokens": ("INT32", [1, 1], struct.pack("<i", 7)),
        "min_tokens": ("INT32", [1, 1], struct.pack("<i", 2)),
        "temperature": ("FP32", [1, 1], struct.pack("<f", 0.5)),
        "seed": ("UINT64", [1, 1], struct.pack("<Q", 3)),
        "stop_words": ("BYTES", [1, 2], strings("a", "bc")),
        "num_return_sequences": ("INT32", [1, 1], struct.pack("<i", 1)),
        "guided_decoding_guide_type": ("BYTES", [1, 1], strings("json_schema")),
        "guided_decoding_guide": ("BYTES", [1, 1], strings('{"type": "object"}')),
    }


def test_the_end_of_the_stream_ends_the_output(use: Use) -> None:
    """Its reason follows from the number of tokens."""
    with fake_triton.serve(three_tokens) as server:
        for max_tokens, reason in ((7, "stop"), (3, "length"), (-1, "stop")):
            found = use(
                server.url,
                lambda client, limit=max_tokens: client.generate("Hi", max_tokens=limit),
                layout=LAYOUT,
            )
            assert found == Completion("Hello wörld", reason, 5, 3)


def test_several_outputs_are_told_apart_by_their_sequence_index(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield response("a", index=1)
        yield response("x", index=0)
        yield response("b", index=1)

    with fake_triton.serve(script) as server:
        found = use(
            server.url,
            lambda client: client.stream("Hi", max_tokens=2, n=2).completions(),
            layout=LAYOUT,
        )
    assert [(one.text, one.finish_reason) for one in found] == [("x", "stop"), ("ab", "length")]


def test_an_output_without_a_response_is_an_error(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield response("a", index=1)

    with fake_triton.serve(script) as server, pytest.raises(ServerError, match="last response"):
        use(
            server.url,
            lambda client: client.generate_several("Hi", max_tokens=2, n=2),
            layout=LAYOUT,
        )


def test_echo_includes_the_prompt(use: Use) -> None:
    with fake_triton.serve(three_tokens) as server:
        use(
            server.url, lambda client: client.generate("Hi", max_tokens=2, echo=True), layout=LAYOUT
        )
        assert server.calls[0].input("exclude_input_in_output")[2] == b"\0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_tokens: is missing; the layout tensorrtllm requires it"),
        ({"max_tokens": 1, "min_p": 0.1}, "min_p: is not supported by the layout tensorrtllm"),
        ({"max_tokens": 1, "num_logprobs": 1}, "num_logprobs: is not supported"),
        ({"max_tokens": 1, "sampling_parameters": {}}, "sampling_parameters: is not supported"),
        ({"max_tokens": 1, "ignore_eos": True}, "ignore_eos: is not supported"),
        ({"max_tokens": 1, "max_token": 1}, "max_token is not an option; did you mean 'max_tok"),
        ({"max_tokens": 1, "add_special_tokens": True}, "add_special_tokens: is not supported"),
        ({"max_tokens": "x"}, "max_tokens: 'x' is not an integer"),
    ],
)
def test_what_the_layout_cannot_express_is_refused(
    use: Use, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        use("127.0.0.1:1", lambda client: client.generate("Hi", **options), layout=LAYOUT)


def test_token_ids_are_refused(use: Use) -> None:
    with pytest.raises(InvalidRequest, match="prompt: token ids are not supported by the layout"):
        use("127.0.0.1:1", lambda client: client.generate([1], max_tokens=1), layout=LAYOUT)
