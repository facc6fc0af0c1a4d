"""The client against a fake server in this process."""

from __future__ import annotations

import gc
import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import fake_triton
import inflight_client
from fake_triton import Call, answer
from inflight.triton import contract as contract
from inflight_client import (
    Cancelled,
    Candidate,
    Client,
    Completion,
    ConnectionFailed,
    InvalidRequest,
    Options,
    ServerError,
    TimedOut,
    Unavailable,
)
from inflight_client.option_table import DATATYPES

WAIT_S = 10.0


def two_words(call: Call) -> Iterator[Any]:
    yield answer("Hello", num_output=2)
    yield answer(" wörld", "stop", num_output=3)


def endless(call: Call) -> Iterator[Any]:
    yield answer("Hello")
    call.ended.wait(WAIT_S)


def test_generate_joins_the_deltas_and_adds_up_the_tokens() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.generate("Hi") == Completion("Hello wörld", "stop", 5, 5)


def test_a_stream_yields_all_deltas_and_the_finish_reason_in_the_last() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        deltas = list(client.stream("Hi"))
    assert [(d.text, d.finish_reason) for d in deltas] == [("Hello", None), (" wörld", "stop")]


def test_options_travel_as_the_tensors_of_the_contract() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate(
            "Grüße",
            max_tokens=7,
            temperature=0.5,
            seed=2**64 - 1,
            ignore_eos=True,
            stop_words=["a", "bc"],
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


def test_the_outputs_of_sampling_parameters_are_all_waited_for() -> None:
    def one_of_two(call: Call) -> Iterator[Any]:
        yield answer("a", "stop", index=1)

    with (
        fake_triton.serve(one_of_two) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="before its last response"),
    ):
        client.generate_several("Hi", sampling_parameters={"n": 2})


def test_logprobs_come_back_by_token() -> None:
    def script(call: Call) -> Iterator[Any]:
        first = [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
        second = [
            {
                "6": {"logprob": -2.5, "rank": 3, "decoded_token": "b"},
                "5": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            },
            {"7": {"logprob": -0.125, "rank": 1, "decoded_token": "é"}},
        ]
        yield answer("a", logprobs=json.dumps(first))
        yield answer("bé", "stop", num_output=2, logprobs=json.dumps(second))

    a, b = Candidate(5, -0.5, 1, "a"), Candidate(6, -2.5, 3, "b")
    expected = ((a,), (b, Candidate(5, -0.25, 1, "a")), (Candidate(7, -0.125, 1, "é"),))
    with fake_triton.serve(script) as server, Client(server.url) as client:
        deltas = list(client.stream("Hi", num_logprobs=1))
        assert [delta.logprobs for delta in deltas] == [expected[:1], expected[1:]]
        assert client.generate("Hi", num_logprobs=1).logprobs == expected


def test_a_prompts_logprobs_come_before_the_output_and_once() -> None:
    one = {"6": {"logprob": -2.5, "rank": 3, "decoded_token": "b"}}
    two = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "é"}}

    def script(call: Call) -> Iterator[Any]:
        yield answer("", num_output=0, prompt_logprobs=json.dumps([None, one]))
        yield answer("a", prompt_logprobs=json.dumps([two]))
        yield answer("b", "stop")

    expected = ((), (Candidate(6, -2.5, 3, "b"),), (Candidate(7, -0.5, 1, "é"),))
    with fake_triton.serve(script) as server, Client(server.url) as client:
        deltas = list(client.stream("Hi", num_prompt_logprobs=0))
        assert [delta.prompt_logprobs for delta in deltas] == [expected[:2], expected[2:], ()]
        assert client.generate("Hi", num_prompt_logprobs=0).prompt_logprobs == expected


def test_of_several_outputs_the_first_has_the_prompts_logprobs() -> None:
    def script(call: Call) -> Iterator[Any]:
        outputs = [(0, "eins", "stop", 2, ""), (1, "zwei", "length", 7, "")]
        yield fake_triton.answers(outputs, prompt_logprobs="[null]")

    with fake_triton.serve(script) as server, Client(server.url) as client:
        first, second = client.generate_several("Hi", n=2, num_prompt_logprobs=0)
    assert (first.prompt_logprobs, second.prompt_logprobs) == (((),), ())


def test_a_prompts_logprobs_that_cannot_be_read_are_named() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("a", "stop", prompt_logprobs="[1]")

    with (
        fake_triton.serve(script) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="output prompt_logprobs cannot be read"),
    ):
        client.generate("Hi")


@pytest.mark.parametrize("text", ["{", "[1]", '[{"x": {}}]', '[{"1": {"logprob": 1}}]'])
def test_logprobs_that_cannot_be_read_are_the_servers_fault(text: str) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("a", "stop", logprobs=text)

    with (
        fake_triton.serve(script) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="output logprobs cannot be read"),
    ):
        client.generate("Hi")


def test_only_given_options_are_sent() -> None:
    """What is left out is the server's choice."""
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate("Hi")
        assert server.calls[0].input_names() == ["text_input", "stream"]


def test_a_chat_travels_as_json_to_the_chat_model() -> None:
    messages: list[inflight_client.Message] = [{"role": "user", "content": 'Say "é"'}]
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.chat(messages).text == "Hello wörld"
        assert "".join(delta.text for delta in client.chat_stream(messages)) == "Hello wörld"
        whole, streamed = server.calls
    assert whole.request.model_name == streamed.request.model_name == "chat"
    datatype, shape, raw = whole.input("messages")
    assert (datatype, shape, json.loads(raw[4:])) == ("BYTES", [1], messages)
    assert whole.input("stream")[2] == b"\0"
    assert streamed.input("stream")[2] == b"\1"


def test_several_outputs_in_one_response_come_in_their_order() -> None:
    def both(call: Call) -> Iterator[Any]:
        yield fake_triton.answers([(0, "eins", "stop", 2, ""), (1, "zwei", "length", 7, "")])

    with fake_triton.serve(both) as server, Client(server.url) as client:
        found = client.generate_several("Hi", n=2, best_of=3, speculation="auto")
        client.generate_several("Hi", n=2, beam_width=4, length_penalty=0.5, early_stopping=True)
        call, search = server.calls
    assert found == [Completion("eins", "stop", 5, 2), Completion("zwei", "length", 5, 7)]
    assert call.input("n") == ("INT32", [1], struct.pack("<i", 2))
    assert call.input("best_of") == ("INT32", [1], struct.pack("<i", 3))
    assert call.input("speculation") == ("BYTES", [1], b"\4\0\0\0auto")
    assert search.input("beam_width") == ("INT32", [1], struct.pack("<i", 4))
    assert search.input("length_penalty") == ("FP32", [1], struct.pack("<f", 0.5))
    assert search.input("early_stopping") == ("BOOL", [1], b"\1")


def test_several_outputs_stream_concurrently() -> None:
    def mixed(call: Call) -> Iterator[Any]:
        yield answer("a", index=1)
        yield answer("x")
        yield answer("b", "stop", index=1)
        yield answer("y", "stop")

    with fake_triton.serve(mixed) as server, Client(server.url) as client:
        deltas = list(client.stream("Hi", n=2))
        assert [(d.index, d.text) for d in deltas] == [(1, "a"), (0, "x"), (1, "b"), (0, "y")]
        assert [c.text for c in client.stream("Hi", n=2).completions()] == ["xy", "ab"]


def test_a_stream_that_lacks_an_output_s_end_is_an_error() -> None:
    def one_of_two(call: Call) -> Iterator[Any]:
        yield answer("a", "stop", index=1)
        yield answer("x")

    with (
        fake_triton.serve(one_of_two) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="before its last response"),
    ):
        client.generate_several("Hi", n=2)


def test_a_guide_travels_as_two_strings() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate("Hi", guided_decoding_guide_type="regex", guided_decoding_guide="a+")
        (call,) = server.calls
    assert call.input("guided_decoding_guide") == ("BYTES", [1], b"\2\0\0\0a+")


def test_each_request_is_a_stream_of_one_request() -> None:
    """Half-closed at once: the server can end the stream, and no idle stream delays its drain."""
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        client.generate("Hi")
        (call,) = server.calls
    assert call.half_closed
    assert call.metadata["triton_grpc_error"] == "true"


def test_an_empty_final_response_is_no_delta() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield from two_words(call)
        yield fake_triton.empty_final()

    with fake_triton.serve(script) as server, Client(server.url) as client:
        assert len(list(client.stream("Hi"))) == 2


def test_a_finished_stream_ends_well_on_the_servers_side() -> None:
    ended_well: list[bool] = []

    def script(call: Call) -> Iterator[Any]:
        yield from two_words(call)
        ended_well.append(call.context.is_active())

    with fake_triton.serve(script) as server, Client(server.url) as client:
        assert len(list(client.stream("Hi"))) == 2
    assert ended_well == [True]


def test_closing_a_stream_cancels_the_request() -> None:
    with fake_triton.serve(endless) as server, Client(server.url) as client:
        with client.stream("Hi") as stream:
            assert next(stream).text == "Hello"
            assert not server.calls[0].ended.is_set()
        assert server.calls[0].ended.wait(WAIT_S)
        assert list(stream) == []


def test_losing_a_stream_cancels_the_request() -> None:
    with fake_triton.serve(endless) as server, Client(server.url) as client:
        stream = client.stream("Hi")
        next(stream)
        del stream
        gc.collect()
        assert server.calls[0].ended.wait(WAIT_S)


def test_a_generator_around_a_stream_cancels_when_it_is_closed() -> None:
    def words(client: Client) -> Iterator[str]:
        with client.stream("Hi") as stream:
            for delta in stream:
                yield delta.text

    with fake_triton.serve(endless) as server, Client(server.url) as client:
        generator = words(client)
        assert next(generator) == "Hello"
        generator.close()  # type: ignore[attr-defined]
        assert server.calls[0].ended.wait(WAIT_S)


def test_closing_from_another_thread_ends_a_waiting_reader() -> None:
    with fake_triton.serve(endless) as server, Client(server.url) as client:
        stream = client.stream("Hi")
        next(stream)
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        with pytest.raises(Cancelled):
            next(stream)
        closer.join()


def test_the_timeout_bounds_the_whole_request() -> None:
    with fake_triton.serve(endless) as server, Client(server.url, timeout=1.5) as client:
        stream = client.stream("Hi")
        assert next(stream).text == "Hello"
        with pytest.raises(TimedOut, match=r"no complete response within the timeout of 1\.5 s"):
            next(stream)


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), float("inf"), "5"])
def test_a_timeout_that_cannot_be_one_is_refused(timeout: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"timeout: .* is not a valid number of seconds; allowed"
    ):
        Client(timeout=timeout)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:8001", "localhost:8001"),
        ("http://127.0.0.1:8001", "127.0.0.1:8001"),
        ("grpc://triton.example:1/", "triton.example:1"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_a_url_is_host_and_port(url: str, address: str) -> None:
    with Client(url) as client:
        assert client.url == address


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost", ":8001", "localhost:", "localhost:0", "localhost:65536", "::1:8001"),
        *("https://localhost:8001", "http://localhost", "localhost:8001/v2", "a b:8001", None),
    ],
)
def test_an_invalid_grpc_url_is_rejected(url: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"url: .* is not host:port; .* 127\.0\.0\.1:8001"):
        Client(url)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, InvalidRequest),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INTERNAL, ServerError),
    ],
)
def test_a_status_becomes_an_error_of_ours(code: grpc.StatusCode, kind: type[Exception]) -> None:
    def script(call: Call) -> Iterator[Any]:
        call.context.abort(code, "max_tokens: 0 is out of range")
        yield

    with (
        fake_triton.serve(script) as server,
        Client(server.url) as client,
        pytest.raises(kind, match="max_tokens: 0 is out of range"),
    ):
        client.generate("Hi", max_tokens=0)


def test_an_error_inside_a_stream_that_ends_well_is_raised() -> None:
    """Triton reports an unknown model this way, whatever the request."""

    def script(call: Call) -> Iterator[Any]:
        yield fake_triton.error("Request for unknown model: 'nope' is not found")

    with (
        fake_triton.serve(script) as server,
        Client(server.url, generate_model="nope") as client,
        pytest.raises(InvalidRequest, match="unknown model"),
    ):
        client.generate("Hi")


def test_a_stream_that_ends_without_a_last_response_is_an_error() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("Hello")

    with (
        fake_triton.serve(script) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="before its last response"),
    ):
        client.generate("Hi")


def test_no_server_is_a_failed_connection() -> None:
    with fake_triton.serve(two_words) as server:
        url = server.url
    with Client(url, timeout=5) as client, pytest.raises(ConnectionFailed):
        client.generate("Hi")


def test_a_server_that_dies_is_a_failed_connection() -> None:
    with (
        Client(_dying_server()) as client,
        pytest.raises(ConnectionFailed, match=f"url is {client.url}; it must be gRPC's host:port"),
    ):
        list(client.stream("Hi"))


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
    for name in ("stream", "priority_class", "deadline_ms"):
        del served[name]
    assert {
        name: "STRING" if datatype == "BYTES" else datatype for name, datatype in DATATYPES.items()
    } == served
    assert set(Options.__annotations__) == {*DATATYPES, "logit_bias"}


def test_readiness_is_queried_from_the_server() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.is_ready()
    with (
        Client(server.url, timeout=5) as client,
        pytest.raises(ConnectionFailed, match="it must be gRPC's host:port"),
    ):
        client.is_ready()


def test_model_readiness_is_queried_by_name() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.is_model_ready("chat")
        assert not client.is_model_ready("nope")


def test_a_version_is_sent_with_each_request() -> None:
    for version, sent in ((None, ""), (0, "0"), (12, "12")):
        with (
            fake_triton.serve(two_words) as server,
            Client(server.url, version=version) as client,
        ):
            client.generate("Hi")
            client.chat([{"role": "user", "content": "Hi"}])
            assert client.is_model_ready("chat")
        assert [call.request.model_version for call in server.calls] == [sent, sent]
    for wrong in (-1, True, "1"):
        with pytest.raises(InvalidRequest, match=r"version: is .*; allowed: 0 or more, or None"):
            Client(version=wrong)  # type: ignore[arg-type]


def test_threads_may_share_a_client() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer(call.input("text_input")[2][4:].decode(), "stop")

    texts: dict[int, str] = {}
    with fake_triton.serve(script) as server, Client(server.url) as client:

        def ask(number: int) -> None:
            texts[number] = client.generate(f"number {number}").text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {number: f"number {number}" for number in range(6)}


def test_the_public_names_are_a_list_without_surprises() -> None:
    assert inflight_client.__all__ == sorted(inflight_client.__all__)
    assert all(hasattr(inflight_client, name) for name in inflight_client.__all__)


def _dying_server() -> str:
    """The address of a server that takes one connection and drops it."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))

    def drop() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.close()
        listener.close()

    threading.Thread(target=drop, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"
