"""Requests and responses in the form of vLLM's backend."""

import numpy as np
import pytest

from inflight.core.request import Candidate, FinishReason, TokenEvent
from inflight.errors import RequestError
from inflight.triton import protocol
from inflight.triton.completion.vllm import Vllm
from llm_tensors import LIMITS, flags, ints, strings

DIALECT = Vllm()


def read(parameters=None, **inputs):
    return DIALECT.read({"text_input": strings("Hello"), **inputs}, parameters or {}, None)


def generation(parameters=None, **inputs):
    asked = read(parameters, **inputs)
    return protocol.parse({"input_ids": ints(1, 2), **asked.inputs}, asked.parameters, LIMITS)


def refusal(**inputs):
    with pytest.raises(RequestError) as caught:
        generation(**inputs)
    return str(caught.value)


def test_the_defaults_are_vllms():
    """16 tokens fit the context of the limits, a temperature of 1, and the prompt first."""
    found = generation()
    assert found.params.max_tokens == 16 and found.params.effective_temperature == 1.0
    assert found.echo and not found.stream


@pytest.mark.parametrize("given", ["sampling_parameters", "parameters"])
def test_options_come_before_the_defaults(given):
    options = {"max_tokens": "4", "temperature": "0", "top_p": "1"}
    if given == "parameters":
        found = generation(options)
    else:
        found = generation(sampling_parameters=strings('{"max_tokens": "4", "temperature": 0}'))
    assert found.params.max_tokens == 4 and found.params.effective_temperature == 0.0


def test_request_parameters_are_not_read_beside_the_tensor():
    found = generation({"max_tokens": 4, "unknown": 1}, sampling_parameters=strings("{}"))
    assert found.params.max_tokens == 16


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False)],
)
def test_the_prompt_precedes_the_output_unless_it_is_excluded(stream, exclude, echo):
    inputs = {} if exclude is None else {"exclude_input_in_output": flags(exclude)}
    found = generation(stream=flags(stream), **inputs)
    assert (found.stream, found.echo) == (stream, echo)


def test_what_is_not_supported_is_refused_by_name():
    stream = {"stream": flags(True), "exclude_input_in_output": flags(False)}
    assert refusal(**stream) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )
    assert refusal(image=strings("x")) == (
        "image: is not supported: only text is supported; omit it"
    )
    assert refusal(embedding_request=strings("{}")).startswith("embedding_request: is not supp")
    assert refusal(return_logprobs=ints(1)).startswith("return_logprobs: has dtype int32")


def respond(asked, found, *parts):
    """The tensors of a response with (output, text, event) of its parts."""
    deltas = [protocol.OutputDelta(output, event, []) for output, _, event in parts]
    arrays = protocol.outputs(deltas, len(found.prompt_ids))
    (response,) = asked.responses([text for _, text, _ in parts], arrays)
    return response


ALL = {
    f"return_{name}": flags(True) for name in ("finish_reason", "cumulative_logprob", "logprobs")
} | {f"return_num_{name}_tokens": flags(True) for name in ("input", "output")}


def test_a_response_has_only_the_outputs_that_were_requested():
    event = TokenEvent(7, [5], position=1, finish_reason=FinishReason.STOP)
    found = generation()
    assert set(respond(read().make_builder(found), found, (0, "a", event))) == {"text_output"}
    builder = read(return_finish_reason=flags(True), return_logprobs=flags(False)).make_builder(
        found
    )
    assert set(respond(builder, found, (0, "a", event))) == {"text_output", "finish_reason"}


def test_a_stream_has_deltas_and_no_reason_until_the_end():
    inputs = {**ALL, "sampling_parameters": strings('{"logprobs": 1}'), "stream": flags(True)}
    found = generation(**inputs)
    builder = read(**inputs).make_builder(found)
    token = [Candidate(5, -0.5, 1, "a")]
    first = respond(
        builder, found, (0, "a", TokenEvent(7, [5], candidates=[token], cumulative_logprob=-0.5))
    )
    assert first["finish_reason"].tolist() == [b"None"]
    assert first["logprobs"].tolist() == [
        b'[{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]'
    ]
    assert first["cumulative_logprob"].tolist() == [-0.5]
    assert first["num_input_tokens"].tolist() == [2]
    assert first["num_output_tokens"].tolist() == [1]
    end = TokenEvent(7, [], finish_reason=FinishReason.CANCELLED)
    last = respond(builder, found, (0, "", end))
    assert last["finish_reason"].tolist() == [b"abort"]
    assert last["logprobs"].tolist() == [b"[]"]


def test_logprobs_are_null_unless_a_number_of_them_was_set():
    found = generation(**ALL)
    answer = respond(read(**ALL).make_builder(found), found, (0, "a", TokenEvent(7, [5])))
    assert answer["logprobs"].tolist() == [b"null"]


def test_a_response_has_an_element_for_each_output():
    """Of a stream, which reports one output at a time; those that have ended keep their reason."""
    inputs = {**ALL, "sampling_parameters": strings('{"n": 2}'), "stream": flags(True)}
    found = generation(**inputs)
    builder = read(**inputs).make_builder(found)
    ended = TokenEvent(7, [5, 6], cumulative_logprob=-2.0, finish_reason=FinishReason.STOP)
    first = respond(builder, found, (1, "b", ended))
    assert first["text_output"].tolist() == [b"", b"b"]
    assert first["finish_reason"].tolist() == [b"None", b"stop"]
    assert first["num_output_tokens"].tolist() == [0, 2]
    second = respond(builder, found, (0, "a", TokenEvent(6, [4], cumulative_logprob=-1.0)))
    assert second["text_output"].tolist() == [b"a", b""]
    assert second["finish_reason"].tolist() == [b"None", b"stop"]
    assert second["cumulative_logprob"].tolist() == [-1.0, -2.0]


def test_arrays_have_the_datatypes_of_the_contract():
    found = generation(**ALL)
    answer = respond(read(**ALL).make_builder(found), found, (0, "a", TokenEvent(7, [5])))
    types = {"STRING": object, "FP32": np.float32, "UINT32": np.uint32}
    expected = {one.name: types[one.datatype] for one in DIALECT.contract.outputs}
    assert {name: array.dtype for name, array in answer.items()} == expected
