"""Prompts become ids, or an answer that names their tensor."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from inflight.errors import ConfigError
from inflight.text.chat import encode_chat
from inflight.triton.model import _ROLES

REPOSITORY = Path(__file__).parents[3] / "model_repository"


@pytest.fixture(scope="module")
def tokenizer():
    return _ROLES["tokenizer"](REPOSITORY / "tokenizer", {"llm": "llm", "max_prompt_bytes": "1000"})


@pytest.fixture(scope="module")
def chat_tokenizer():
    return _ROLES["chat_tokenizer"](REPOSITORY / "chat_tokenizer", {"llm": "llm"})


def ask(front, *requests):
    return front.execute([pb_utils.InferenceRequest(inputs) for inputs in requests])


def strings(*values):
    return np.array(values, object)


def test_text_becomes_ids(tokenizer):
    (response,) = ask(tokenizer, {"text_input": strings("The capital of Köln".encode())})
    ids = response.tensors["input_ids"]
    assert ids.dtype == np.int32
    assert ids.tolist() == tokenizer._tokenizer.encode("The capital of Köln")
    assert response.tensors["prompt_tensor"].tolist() == [b"text_input"]


def test_a_chat_becomes_the_ids_of_its_template(chat_tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    (response,) = ask(chat_tokenizer, {"messages": strings(json.dumps(messages).encode())})
    expected = encode_chat(chat_tokenizer._tokenizer, messages)
    assert response.tensors["input_ids"].tolist() == expected
    assert response.tensors["prompt_tensor"].tolist() == [b"messages"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "text_input: is missing"),
        ({"text_input": strings(b"")}, "text_input: is empty; allowed: at least one character"),
        ({"text_input": strings(b"a\xff")}, "text_input: is not valid UTF-8 (at byte 1)"),
        ({"text_input": strings(b"a", b"b")}, "text_input: has shape [2]; allowed: [1]"),
        ({"text_input": strings(b"a" * 1001)}, "text_input: 1001 bytes are too many; allowed: 10"),
    ],
)
def test_what_is_not_a_prompt_is_refused(tokenizer, inputs, message):
    good, bad = ask(tokenizer, {"text_input": strings(b"fine")}, inputs)
    assert good.error() is None
    assert bad.error().code() == pb_utils.TritonError.INVALID_ARG
    assert bad.error().message().startswith(message)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '[{"role": "wizard", "content": "x"}]'])
def test_what_is_not_a_chat_is_refused(chat_tokenizer, text):
    (response,) = ask(chat_tokenizer, {"messages": strings(text.encode())})
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert response.error().message().startswith("messages")


def test_an_unexpected_failure_is_answered_without_its_details(tokenizer, monkeypatch, caplog):
    def broken(tokenizer, text):
        raise RuntimeError("at 0x7f001234")

    monkeypatch.setattr(tokenizer, "_encode", broken)
    (response,) = ask(tokenizer, {"text_input": strings(b"x")})
    assert response.error().message() == "the prompt could not be tokenized"


@pytest.mark.parametrize("name", ["", "missing", "../llm", "."])
def test_the_sibling_must_be_there(tmp_path, name):
    shutil.copytree(REPOSITORY / "llm", tmp_path / "llm")
    with pytest.raises(ConfigError, match="the parameter 'llm' is"):
        _ROLES["tokenizer"](tmp_path / "tokenizer", {"llm": name})


def test_a_model_without_a_tokenizer_speaks_ids_only(tmp_path):
    version = tmp_path / "llm" / "1"
    version.mkdir(parents=True)
    (version / "engine.json").write_text('{"model": "checkpoint"}')
    (version / "checkpoint").mkdir()
    (version / "checkpoint" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokenizer, so the model takes token ids only"):
        _ROLES["tokenizer"](tmp_path / "tokenizer", {"llm": "llm"})


@pytest.mark.parametrize("text", ["0", "-1", "1e6", "lots"])
def test_max_prompt_bytes_is_checked(text):
    with pytest.raises(ConfigError, match=r"max_prompt_bytes is .*; allowed: 1 or more"):
        _ROLES["tokenizer"](REPOSITORY / "tokenizer", {"llm": "llm", "max_prompt_bytes": text})
