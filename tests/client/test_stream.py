"""Streams of deltas, and how they end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import WAIT_S, Call, answer, endless, two_words
from inflight_client import Cancelled, Client, InvalidRequest, ServerError, TimedOut


def test_a_stream_yields_all_deltas_and_the_finish_reason_in_the_last() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        deltas = list(client.stream("Hi"))
    assert [(d.text, d.finish_reason) for d in deltas] == [("Hello", None), (" wörld", "stop")]


def test_the_outputs_of_sampling_parameters_are_all_waited_for() -> None:
    def one_of_two(call: Call) -> Iterator[Any]:
        yield answer("a", "stop", index=1)

    with (
        fake_triton.serve(one_of_two) as server,
        Client(server.url) as client,
        pytest.raises(ServerError, match="before its last response"),
    ):
        client.generate_several("Hi", sampling_parameters={"n": 2})


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
        for delay_s in (0.1, 1.0, 10.0):  # until the reader waits before the stream is closed
            stream = client.stream("Hi")
            next(stream)
            closer = threading.Timer(delay_s, stream.close)
            closer.start()
            try:
                next(stream)
            except (Cancelled, StopIteration) as error:
                ended = error
            closer.join()
            if isinstance(ended, Cancelled):
                break
        assert isinstance(ended, Cancelled)


def test_the_timeout_bounds_the_whole_request() -> None:
    for timeout in (1.5, 20.5):  # until it is enough for the first response
        with fake_triton.serve(endless) as server, Client(server.url, timeout=timeout) as client:
            stream = client.stream("Hi")
            responses = []
            text = f"no complete response within the timeout of {timeout} s"
            with pytest.raises(TimedOut, match=text):
                for delta in stream:
                    responses.append(delta.text)
        if responses:
            break
    assert responses == ["Hello"]


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
