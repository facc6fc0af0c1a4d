"""Log-probabilities of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, answer
from inflight_client import Candidate, Client, ServerError


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
