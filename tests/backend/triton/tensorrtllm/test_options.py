"""Inputs of TensorRT-LLM's backend become our options, or are refused by name."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import inflight
from inflight.errors import RequestError
from inflight.triton import contract, protocol
from inflight.triton.tensorrtllm import options
from llm_tensors import LIMITS, flags, floats, ints, strings

ROOT = Path(inflight.__file__).parent / "_repository" / "layouts" / "tensorrtllm"
DATATYPES = {tensor.name: tensor.datatype for tensor in contract.OPTIONS}
# Read by the models themselves.
OWN = {
    *("text_input", "embedding_bias_words", "embedding_bias_weights", "pad_id", "embedding_bias"),
    *("input_ids", "input_lengths", "stop", "stop_words_list", "bad_words_list"),
    *("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"),
}


def params(**inputs):
    """The sampling of a request with these inputs."""
    found = options.options({"max_tokens": ints(4), **inputs})
    return protocol.parse({"input_ids": ints(1, 2), **found}, {}, LIMITS)


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
def test_every_input_of_the_models_has_an_effect_or_a_refusal(name):
    text = (ROOT / name / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    for tensor in config.input:
        ours = options._RENAMED.get(tensor.name, tensor.name)
        assert tensor.optional
        if ours in options._PASSED:
            declared = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            assert declared == DATATYPES[ours], tensor.name
        else:
            assert tensor.name in OWN or tensor.name in options._REFUSED, tensor.name


@pytest.mark.parametrize(
    ("inputs", "temperature", "top_k", "top_p"),
    [
        ({}, 0.0, 0, 1.0),
        ({"temperature": floats(0.7)}, 0.0, 0, 1.0),
        ({"temperature": floats(0.7), "top_k": ints(0), "top_p": floats(0.0)}, 0.0, 0, 1.0),
        ({"top_k": ints(1), "top_p": floats(0.0)}, 1.0, 1, 1.0),
        ({"runtime_top_k": ints(40)}, 1.0, 40, 1.0),
        ({"temperature": floats(0.7), "runtime_top_p": floats(0.5)}, 0.7, 0, 0.5),
        ({"top_p": floats(1.0)}, 1.0, 0, 1.0),
    ],
)
def test_top_k_and_top_p_of_0_are_off_and_without_both_it_is_greedy(
    inputs, temperature, top_k, top_p
):
    found = params(**inputs).params
    assert found.temperature == pytest.approx(temperature)
    assert (found.top_k, found.top_p) == (top_k, top_p)


def test_names_of_the_model_for_token_ids_are_others():
    inputs = {
        "request_output_len": ints(7),
        "streaming": flags(True),
        "random_seed": np.array([5], np.uint64),
        "runtime_top_k": ints(3),
        "num_return_sequences": ints(2),
    }
    found = protocol.parse({"input_ids": ints(1), **options.options(inputs)}, {}, LIMITS)
    assert (found.params.max_tokens, found.params.seed, found.params.top_k) == (7, 5, 3)
    assert found.stream and found.n == 2
    assert options.client_names(inputs)["max_tokens"] == "request_output_len"


def test_an_error_names_the_clients_tensor():
    with pytest.raises(RequestError, match="runtime_top_k: has dtype float32; allowed: INT32"):
        options.options({"runtime_top_k": floats(4.0)})


def test_a_beam_search_returns_its_beams_and_ignores_sampling():
    given = {"temperature": floats(0.5), "top_k": ints(5), "length_penalty": floats(1.5)}
    found = params(beam_width=ints(3), **given)
    assert (found.params.beam_width, found.n, found.params.length_penalty) == (3, 3, 1.5)
    assert params(beam_width=ints(3), num_return_sequences=ints(2)).n == 2
    assert params(beam_width=ints(1), **given).params.length_penalty == 1.0


def test_a_negative_end_id_disables_the_end():
    assert params(end_id=ints(-1)).params.ignore_eos
    assert params(end_id=ints(7)).params.end_id == 7
    guided = {"guided_decoding_guide_type": strings("json")}
    assert "ignore_eos" not in options.options({"end_id": ints(-1), **guided})


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("lora_task_id", np.array([[7]], np.uint64), "LoRA adapters are not supported"),
        ("return_context_logits", np.array([[True]]), "logits are not returned"),
        ("prompt_vocab_size", np.array([[8]], np.int32), "prompt tuning is not supported"),
        ("image_url_input", np.array([[b"http://x"]], object), "only text is supported"),
        ("draft_input_ids", np.array([[5, 6]], np.int32), "drafts are made by the engine"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, array, message):
    with pytest.raises(RequestError) as caught:
        options.unbatched({name: array})
    assert str(caught.value).startswith(f"{name}: is not supported: {message}")


def test_a_switch_that_is_off_is_not_refused():
    off = {"return_context_logits": np.array([[False]]), "num_draft_tokens": np.array([[0]])}
    assert set(options.unbatched(off)) == set(off)


def test_a_batch_of_several_requests_is_refused():
    with pytest.raises(RequestError, match=r"top_k: has shape \[2, 1\]; allowed: a batch of 1"):
        options.unbatched({"top_k": np.zeros((2, 1), np.int32)})


def test_log_probs_are_padded_with_zeros():
    texts = ['[{"5": {"logprob": -0.5}, "9": {"logprob": -2}}, {"6": {"logprob": -1}}]', ""]
    found = options.log_probs(texts, [-1.5, 0.0])
    assert found["cum_log_probs"].tolist() == [[-1.5, 0.0]]
    assert found["output_log_probs"].tolist() == [[[-0.5, -1.0], [0.0, 0.0]]]
