"""The layout of vllm_backend, against a fake server that declares its model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, empty_final, streamed, strings
from inflight_client import Candidate, Client, Completion, InvalidRequest, ServerError

Use = Callable[..., Any]
LAYOUT = "vllm"


def response(*outputs: tuple[str, str, int], logprobs: str = "") -> Any:
    """(text, finish reason, tokens) of each output."""
    texts, reasons, counts = zip(*outputs, strict=True)
    tensors = [
        ("text_output", "BYTES", [len(outputs)], strings(*texts)),
        ("finish_reason", "BYTES", [len(outputs)], strings(*reasons)),
        ("num_input_tokens", "UINT32", [1], struct.pack("<I", 5)),
        ("num_output_tokens", "UINT32", [len(outputs)], struct.pack(f"<{len(counts)}I", *counts)),
    ]
    if logprobs:
        tensors.append(("logprobs", "BYTES", [1], strings(logprobs)))
    return streamed(*tensors)


def three_tokens(call: Call) -> Iterator[Any]:
    yield response(("Hello", "None", 2))
    yield response((" wörld", "length", 1))
    yield empty_final()


def parameters(call: Call) -> Any:
    datatype, shape, raw = call.input("sampling_parameters")
    assert (datatype, shape) == ("BYTES", [1])
    return json.loads(raw[4:])


def test_options_travel_as_sampling_parameters(use: Use) -> None:
    with fake_triton.serve(three_tokens) as server:
        found = use(
            server.url,
            lambda client: client.generate(
                "Hi",
                max_tokens=7,
                min_length=2,
                temperature=0.5,
                stop_words=["a"],
                end_id=3,
                logit_bias={7: -1.5},
                sampling_parameters={"top_k": 4},
            ),
            layout=LAYOUT,
        )
        (call,) = server.calls
    assert found == Completion("Hello wörld", "length", 5, 3)
    assert call.request.model_name == "vllm_model"
    assert parameters(call) == {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "stop": ["a"],
        "stop_token_ids": [3],
        "logit_bias": {"7": -1.5},
        "top_k": 4,
    }
    switches = {name: call.input(name) for name in call.input_names()}
    del switches["sampling_parameters"], switches["text_input"]
    assert switches == {
        "stream": ("BOOL", [1], b"\0"),
        "exclude_input_in_output": ("BOOL", [1], b"\1"),
        "return_finish_reason": ("BOOL", [1], b"\1"),
        "return_num_input_tokens": ("BOOL", [1], b"\1"),
        "return_num_output_tokens": ("BOOL", [1], b"\1"),
    }


def test_outputs_are_told_apart_by_their_place_and_end_once(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield response(("a", "None", 1), ("x", "stop", 1))
        yield response(("", "None", 0), ("", "stop", 0))
        yield response(("b", "abort", 1), ("", "stop", 0))

    with fake_triton.serve(script) as server:
        with Client(server.url, layout=LAYOUT) as client:
            deltas = list(client.stream("Hi", n=2))
        found = use(
            server.url, lambda client: client.stream("Hi", n=2).completions(), layout=LAYOUT
        )
    assert [(one.index, one.text) for one in deltas] == [(0, "a"), (1, "x"), (0, "b")]
    assert [(one.text, one.finish_reason) for one in found] == [("ab", "cancelled"), ("x", "stop")]


def test_logprobs_are_requested_and_read(use: Use) -> None:
    of_token = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}

    def script(call: Call) -> Iterator[Any]:
        yield response(("", "None", 0), logprobs="null")
        yield response(("a", "stop", 1), logprobs=json.dumps([of_token]))

    with fake_triton.serve(script) as server:
        found = use(server.url, lambda client: client.generate("Hi", num_logprobs=1), layout=LAYOUT)
        (call,) = server.calls
    assert found.logprobs == ((Candidate(5, -0.5, 1, "a"),),)
    assert parameters(call) == {"logprobs": 1}
    assert call.input("return_logprobs") == ("BOOL", [1], b"\1")


@pytest.mark.parametrize(
    ("kind", "guide", "sent"),
    [
        ("json", None, {"json_object": True}),
        ("json_schema", {"type": "object"}, {"json": {"type": "object"}}),
        ("regex", "a+", {"regex": "a+"}),
        ("ebnf_grammar", "root ::= x", {"grammar": "root ::= x"}),
        ("choice", '["a", "b"]', {"choice": ["a", "b"]}),
        ("choice", ["a", "b"], {"choice": ["a", "b"]}),
    ],
)
def test_a_guide_travels_as_json_text(use: Use, kind: str, guide: Any, sent: Any) -> None:
    options = {"guided_decoding_guide_type": kind}
    if guide is not None:
        options["guided_decoding_guide"] = guide
    with fake_triton.serve(three_tokens) as server:
        use(server.url, lambda client: client.generate("Hi", **options), layout=LAYOUT)
        found = parameters(server.calls[0])
    assert json.loads(found["structured_outputs"]) == sent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "off"}, "speculation: is not supported by the layout vllm"),
        ({"logit_bias_ids": [1]}, "logit_bias_ids: is not supported .*; use logit_bias"),
        ({"max_token": 1}, "max_token is not an option; did you mean 'max_tokens'"),
        ({"cache_salt": "x"}, "cache_salt: is not supported"),
        ({"max_tokens": 1, "sampling_parameters": '{"max_tokens": 2}'}, "max_tokens is also set"),
        ({"sampling_parameters": "{"}, "sampling_parameters: '{' is not a JSON object"),
        ({"sampling_parameters": "[1]"}, "is not a JSON object"),
        ({"guided_decoding_guide": "x"}, "guided_decoding_guide_type: is None; allowed: json, "),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: is missing"),
        (
            {"guided_decoding_guide_type": "choice", "guided_decoding_guide": "a"},
            "is not a JSON list of choices",
        ),
        ({"max_tokens": {1}}, "cannot be written as JSON"),
    ],
)
def test_what_the_layout_cannot_express_is_refused(
    use: Use, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        use("127.0.0.1:1", lambda client: client.generate("Hi", **options), layout=LAYOUT)


def test_a_stream_that_lacks_an_outputs_end_is_an_error(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield response(("a", "None", 1))
        yield empty_final()

    with fake_triton.serve(script) as server, pytest.raises(ServerError, match="last response"):
        use(server.url, lambda client: client.generate("Hi"), layout=LAYOUT)
