"""Tensors become requests, events become tensors."""

import numpy as np
import pytest

from inflight.errors import RequestError
from inflight.request import FinishReason, TokenEvent
from inflight.sampling import SamplingParams
from inflight.triton import protocol
from inflight.triton.protocol import Limits, merge, outputs, parse

LIMITS = Limits(vocab_size=100, max_model_len=16)


def ints(*values):
    return np.array(values, np.int32)


def floats(*values):
    return np.array(values, np.float32)


def flags(*values):
    return np.array(values, bool)


def strings(*values):
    return np.array([value.encode() for value in values], object)


def generation(parameters=None, **inputs):
    return parse({"input_ids": ints(1, 2, 3), **inputs}, parameters or {}, LIMITS)


def refusal(parameters=None, **inputs):
    with pytest.raises(RequestError) as caught:
        generation(parameters, **inputs)
    return str(caught.value)


def test_a_prompt_alone_is_enough():
    asked = generation()
    assert asked.prompt_ids == [1, 2, 3]
    assert asked.params == SamplingParams()
    assert not asked.stream
    assert not asked.echo
    assert not asked.detokenized
    assert asked.cache_salt == ""


def test_every_sampling_tensor_arrives():
    asked = generation(
        max_tokens=ints(9),
        min_tokens=ints(2),
        temperature=floats(0.5),
        top_k=ints(4),
        top_p=floats(0.5),
        min_p=floats(0.25),
        repetition_penalty=floats(1.5),
        presence_penalty=floats(-1),
        frequency_penalty=floats(2),
        seed=np.array([2**64 - 1], np.uint64),
        stop_words=strings("a", "b"),
        bad_words=strings("c"),
        ignore_eos=flags(True),
        end_id=ints(99),
    )
    assert asked.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=2**64 - 1,
        stop_words=("a", "b"),
        bad_words=("c",),
        ignore_eos=True,
        end_id=99,
    )


def test_the_rest_of_the_tensors_arrives():
    asked = generation(
        stream=flags(True),
        exclude_input_in_output=flags(False),
        cache_salt=strings("tenant 7"),
        return_num_input_tokens=flags(True),
        return_num_output_tokens=flags(False),
        n=ints(1),
        num_logprobs=ints(0),
    )
    assert asked.stream
    assert asked.echo
    assert asked.cache_salt == "tenant 7"


def test_only_a_streamed_and_detokenized_request_is_acknowledged():
    """An answer in one piece gives no sign of life before its end."""
    detokenized = {"prompt_tensor": strings("text_input")}
    assert generation(stream=flags(True), **detokenized).request(5).acknowledged
    assert not generation(**detokenized).request(5).acknowledged
    assert not generation(stream=flags(True)).request(5).acknowledged


def test_min_length_is_min_tokens():
    assert generation(min_length=ints(3)).params.min_tokens == 3
    assert "min_length: is another name of min_tokens" in refusal(
        min_length=ints(3), min_tokens=ints(3)
    )
    assert refusal(min_length=ints(-3)).startswith("min_length: -3 is out of range")


def test_a_lone_empty_stop_word_means_none():
    """LiteLLM sends it with every request."""
    asked = generation(stop_words=strings(""), bad_words=strings(""))
    assert asked.params.stop_words == ()
    assert asked.params.bad_words == ()
    assert refusal(stop_words=strings("", "x")).startswith("stop_words: a string of 0 bytes")


def test_the_json_dialect_is_merged():
    asked = generation(
        sampling_parameters=strings('{"max_tokens": "7", "stop": "x"}'), temperature=floats(0.5)
    )
    assert asked.params == SamplingParams(max_tokens=7, stop_words=("x",), temperature=0.5)


def test_the_json_dialect_may_not_repeat_a_tensor():
    message = refusal(sampling_parameters=strings('{"min_tokens": 7}'), min_length=ints(7))
    assert message == (
        "sampling_parameters: min_tokens stands in the tensor min_length too; send one of them"
    )


def test_an_error_in_the_json_dialect_names_it():
    message = refusal(sampling_parameters=strings('{"top_p": 7}'))
    assert message.startswith("sampling_parameters: top_p: 7.0 is out of range; allowed: (0.0")
    assert refusal(sampling_parameters=strings('{"n": 2}')).startswith(
        "sampling_parameters: n: 2 outputs are not supported"
    )
    assert refusal(sampling_parameters=strings('{"stop_token_ids": [100]}')).startswith(
        "sampling_parameters: end_id: 100 is not in the vocabulary"
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"n": ints(2)}, "n: 2 outputs are not supported; allowed: 1"),
        ({"n": ints(0)}, "n: 0 outputs are not supported; allowed: 1"),
        ({"num_logprobs": ints(1)}, "num_logprobs: 1 is not supported; allowed: 0"),
        ({"num_logprobs": ints(-1)}, "num_logprobs: -1 is not supported; allowed: 0"),
        (
            {"guided_decoding_guide": strings("")},
            "guided_decoding_guide: is not supported in this version; leave it out",
        ),
        (
            {"guided_decoding_guide_type": strings("json")},
            "guided_decoding_guide_type: is not supported in this version; leave it out",
        ),
        ({"priority_class": strings("high")}, "priority_class: is not supported in this version"),
        ({"deadline_ms": ints(5)}, "deadline_ms: is not supported in this version"),
    ],
)
def test_what_this_version_cannot_do_is_refused(inputs, message):
    assert refusal(**inputs).startswith(message)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (ints(), "input_ids: the prompt has no tokens"),
        (ints(1, -1), "input_ids: -1 is not in the vocabulary; allowed: 0 to 99"),
        (ints(1, 100), "input_ids: 100 is not in the vocabulary; allowed: 0 to 99"),
        (
            ints(*[1] * 16),
            "input_ids: This model's maximum context length is 16 tokens. However, your prompt "
            "has 16; allowed: 15 and one to generate",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(ids, message):
    assert refusal(input_ids=ids).startswith(message)


def test_the_longest_prompt_fits():
    assert len(generation(input_ids=ints(*[1] * 15)).prompt_ids) == 15


def test_a_missing_prompt_is_refused():
    with pytest.raises(RequestError, match="input_ids: is missing"):
        parse({"max_tokens": ints(1)}, {}, LIMITS)


def test_an_error_in_a_text_prompt_names_the_text():
    message = refusal(input_ids=ints(*[1] * 20), prompt_tensor=strings("messages"))
    assert message.startswith("messages: This model's maximum context length is 16 tokens.")
    assert refusal(prompt_tensor=strings("x")) == "prompt_tensor: allowed: text_input or messages"


def test_unknown_parameters_are_refused_with_the_nearest_name():
    """Over HTTP they are the keys that no tensor has."""
    assert refusal({"temprature": 1}) == (
        "temprature: is neither an input nor a parameter; did you mean 'temperature'?"
    )
    assert refusal({"xyzzy": 1}) == "xyzzy: is neither an input nor a parameter"
    assert refusal({"top_p": 1}) == "top_p: is an input tensor, not a request parameter"


@pytest.mark.parametrize("name", sorted(protocol.HARMLESS_PARAMETERS | {"triton_anything"}))
def test_harmless_parameters_are_accepted(name):
    assert generation({name: 1}).prompt_ids == [1, 2, 3]


@pytest.mark.parametrize("salt", ["x" * 257, "a\nb", "a\x00", "a\u200b"])
def test_a_salt_is_short_and_printable(salt):
    assert refusal(cache_salt=strings(salt)).startswith("cache_salt: allowed: up to 256 char")


def test_a_merged_event_is_what_one_step_would_have_said():
    first = TokenEvent(5, [1, 2], [9], 2, cumulative_logprob=-1.0, num_cached_tokens=3)
    second = TokenEvent(5, [3], [1, 2], 3, 0, None, -2.0, 3)
    last = TokenEvent(5, [4], [2, 3], 4, 6, FinishReason.STOP, -3.0, 3)
    merged = merge(merge(first, second), last)
    assert merged == TokenEvent(5, [1, 2, 3, 4], [9], 4, 6, FinishReason.STOP, -3.0, 3)


def test_outputs_have_the_documented_tensors():
    from inflight.triton.tensors import MODELS, NUMPY

    event = TokenEvent(5, [7, 8], [6], 12, 3, FinishReason.LENGTH, -2.5)
    arrays = outputs(event, num_input_tokens=4, echo=[])
    documented = MODELS["llm"].outputs
    assert set(arrays) == {tensor.name for tensor in documented}
    for tensor in documented:
        assert arrays[tensor.name].dtype == NUMPY[tensor.datatype]
        assert arrays[tensor.name].ndim == 1
        assert tensor.dims in (-1, arrays[tensor.name].size)
    assert arrays["output_ids"].tolist() == [7, 8]
    assert arrays["detokenize_ids"].tolist() == [6, 7, 8]
    assert arrays["detokenize_state"].tolist() == [1, 3, 1, 5, 12]
    assert arrays["finish_reason"].tolist() == [b"length"]
    assert arrays["num_input_tokens"].tolist() == [4]
    assert arrays["num_output_tokens"].tolist() == [2]
    assert arrays["cumulative_logprob"].tolist() == [-2.5]


def test_an_echoed_prompt_leads_and_is_not_counted():
    arrays = outputs(TokenEvent(5, [7], [3], 1), num_input_tokens=3, echo=[1, 2, 3])
    assert arrays["output_ids"].tolist() == [1, 2, 3, 7]
    assert arrays["detokenize_ids"].tolist() == [1, 2, 3, 7]
    assert arrays["detokenize_state"].tolist() == [0, 0, 0, 5, 1]
    assert arrays["num_output_tokens"].tolist() == [1]
    assert arrays["finish_reason"].tolist() == [b""]
