"""Options travel as tensors."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

import fake_triton
from fake_triton import two_words
from inflight.triton import contract
from inflight_client import Client, InvalidRequest, Options
from inflight_client.option_table import DATATYPES


def test_options_travel_as_the_tensors_of_the_contract() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate(
            "Grüße",
            max_tokens=7,
            temperature=0.5,
            seed=2**64 - 1,
            ignore_eos=True,
            stop_words=["a", "bc"],
            cache_priority=100,
            cache_ttl_s=1.5,
        )
        (call,) = server.calls
    assert call.request.model_name == "generate"
    assert call.input("text_input") == ("BYTES", [1], b"\x07\0\0\0" + "Grüße".encode())
    assert call.input("stream") == ("BOOL", [1], b"\0")
    assert call.input("max_tokens") == ("INT32", [1], struct.pack("<i", 7))
    assert call.input("temperature") == ("FP32", [1], struct.pack("<f", 0.5))
    assert call.input("seed") == ("UINT64", [1], b"\xff" * 8)
    assert call.input("ignore_eos") == ("BOOL", [1], b"\1")
    assert call.input("stop_words") == ("BYTES", [2], b"\1\0\0\0a\2\0\0\0bc")
    assert call.input("cache_priority") == ("INT32", [1], struct.pack("<i", 100))
    assert call.input("cache_ttl_s") == ("FP32", [1], struct.pack("<f", 1.5))


def test_lists_and_biases_travel_as_tensors() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate(
            "Hi",
            logit_bias={7: -2.5, 3: 1},
            allowed_token_ids=(3, 7, 9),
            dry_sequence_breakers=["\n"],
            dry_multiplier=0.5,
            no_repeat_ngram_size=3,
            num_logprobs=2,
            num_prompt_logprobs=5,
            echo=True,
        )
        (call,) = server.calls
    assert call.input("logit_bias_ids") == ("INT32", [2], struct.pack("<2i", 7, 3))
    assert call.input("logit_bias_values") == ("FP32", [2], struct.pack("<2f", -2.5, 1))
    assert call.input("allowed_token_ids") == ("INT32", [3], struct.pack("<3i", 3, 7, 9))
    assert call.input("dry_sequence_breakers") == ("BYTES", [1], b"\1\0\0\0\n")
    assert call.input("dry_multiplier") == ("FP32", [1], struct.pack("<f", 0.5))
    assert call.input("no_repeat_ngram_size") == ("INT32", [1], struct.pack("<i", 3))
    assert call.input("num_logprobs") == ("INT32", [1], struct.pack("<i", 2))
    assert call.input("num_prompt_logprobs") == ("INT32", [1], struct.pack("<i", 5))
    assert call.input("echo") == ("BOOL", [1], b"\1")
    assert "logit_bias" not in call.input_names()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"logit_bias": [1, 2]}, r"logit_bias: \[1, 2\] is not a mapping"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias_ids: 'x' is not an integer from -2147483648"),
        ({"logit_bias": {1: "x"}}, "logit_bias_values: 'x' is not a number"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids: 1.5 is not an integer"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids: 2147483648 is not an integer"),
        ({"logit_bias": {1: 1.0}, "logit_bias_ids": [1]}, "cannot be combined with logit_bias_i"),
        ({"seed": -1}, "seed: -1 is not an integer from 0 to 18446744073709551615"),
        ({"temperature": 1e39}, r"temperature: 1e\+39 is not a number that fits 32 bits"),
        ({"ignore_eos": "false"}, "ignore_eos: 'false' is not True or False"),
        ({"cache_salt": b"x"}, "cache_salt: b'x' is not a string; decode the bytes first"),
        ({"cache_salt": bytearray(b"x")}, "is not a string; decode the bytes first"),
        ({"cache_salt": "caf\udce9"}, r"cache_salt: character 4 is '\\udce9', a lone surrogate"),
        ({"stop_words": {"a": 1}}, "stop_words: {'a': 1} is not a string"),
        ({"sampling_parameters": {"n": {1}}}, "cannot be written as JSON"),
        ({"stop_words": [b"x" * 999]}, r"stop_words: b'x{70,75}\.\.\. is not a string"),
    ],
)
def test_an_invalid_tensor_is_rejected_by_name(option: dict[str, Any], message: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=message):
        client.generate("Hi", **option)


def test_a_prompt_is_a_string() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="is not a string"):
        client.generate(b"Hi")  # type: ignore[arg-type]


def test_mappings_travel_as_json() -> None:
    schema = {"type": "object"}
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate("Hi", sampling_parameters={"stop": "é"}, guided_decoding_guide=schema)
        client.generate("Hi", sampling_parameters='{"n": 1}', guided_decoding_guide=["a", "b"])
        mappings, others = server.calls
    for call, name, value in (
        (mappings, "sampling_parameters", {"stop": "é"}),
        (mappings, "guided_decoding_guide", schema),
        (others, "sampling_parameters", {"n": 1}),
        (others, "guided_decoding_guide", ["a", "b"]),
    ):
        datatype, shape, raw = call.input(name)
        assert (datatype, shape, json.loads(raw[4:])) == ("BYTES", [1], value)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"n": 2, "best_of": 3},
        {"sampling_parameters": {"n": 2}},
        {"sampling_parameters": '{"n": "2"}'},
    ],
)
def test_one_completion_does_not_drop_the_others(options: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match=r"n: 2 outputs .* generate_several"):
            client.generate("Hi", **options)
        with pytest.raises(InvalidRequest, match=r"n: 2 outputs .* chat_stream\(...\).completions"):
            client.chat([{"role": "user", "content": "Hi"}], **options)


@pytest.mark.parametrize(
    "parameters", ["", "{", "[1]", '{"n": "x"}', '{"n": null}', '{"n": Infinity}']
)
def test_whether_sampling_parameters_are_right_is_for_the_server_to_say(parameters: str) -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.generate("Hi", best_of=2, sampling_parameters=parameters).text


def test_only_given_options_are_sent() -> None:
    """What is left out is the server's choice."""
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate("Hi")
        assert server.calls[0].input_names() == ["text_input", "stream"]


def test_a_guide_travels_as_two_strings() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate("Hi", guided_decoding_guide_type="regex", guided_decoding_guide="a+")
        (call,) = server.calls
    assert call.input("guided_decoding_guide") == ("BYTES", [1], b"\2\0\0\0a+")


def test_an_option_of_the_wrong_type_is_refused_by_name() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="max_tokens"):
        client.generate("Hi", max_tokens="many")  # type: ignore[arg-type]


def test_an_unknown_option_is_rejected_with_the_closest_name() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="max_token is not an option; did you mean 'max_t"):
            client.generate("Hi", max_token=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="zzz is not an option; allowed: max_tokens, "):
            client.generate("Hi", zzz=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match=r"not an option: stream\(\) and chat_stream\(\)"):
            client.generate("Hi", stream=True)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="text_input is not an option"):
            client.generate("Hi", text_input="Ho")  # type: ignore[call-arg]


def test_the_options_are_those_of_the_server() -> None:
    """The two share no code."""
    served = {tensor.name: tensor.datatype for tensor in contract.OPTIONS}
    del served["stream"]
    assert {
        name: "STRING" if datatype == "BYTES" else datatype for name, datatype in DATATYPES.items()
    } == served
    assert set(Options.__annotations__) == {*DATATYPES, "logit_bias"}
