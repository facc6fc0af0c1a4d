"""Text to token ids and back, and the description of the model: calls of the native layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight_client import tensors
from inflight_client.calls.flow import Flow, retried
from inflight_client.calls.retries import Retries
from inflight_client.errors import ServerError
from inflight_client.options import (
    CHAT_INPUTS,
    PROMPT_INPUTS,
    Message,
    as_json,
    extra_tensors,
)

MODELS = ("tokenizer", "chat_tokenizer", "detokenizer")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that a server runs.

    Attributes:
        model: its name for clients.
        max_model_len: tokens of a prompt and its output together.
        vocab_size: number of token ids.
        bos_token: text of the beginning-of-sequence token; None if there is none.
        eos_token: text of the end-of-sequence token; None if there is none.
        chat_template: in Jinja; None if there is none.
        special_tokens: texts of tokens that are not part of a text.
    """

    model: str
    max_model_len: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    special_tokens: tuple[str, ...]


def tokenize(
    prompt: str | Sequence[Message], options: Mapping[str, Any], version: str, retries: Retries
) -> Flow[list[int]]:
    """The token ids of a text, or of a chat through its template."""
    if isinstance(prompt, str):
        model, name, text, allowed = "tokenizer", "text_input", prompt, PROMPT_INPUTS
    else:
        model, name, allowed = "chat_tokenizer", "messages", CHAT_INPUTS
        text = as_json("messages", list(prompt))
    request = tensors.infer_request(model, version)
    tensors.add_input(request, name, "BYTES", text)
    for tensor in extra_tensors(options, allowed):
        tensors.add_input(request, *tensor)
    # With all outputs requested, a prompt that is rejected would be data instead of an error.
    request.outputs.add(name="input_ids")
    response = yield from retried("ModelInfer", request, retries)
    return tensors.outputs(response).get("input_ids", [])


def detokenize(ids: Sequence[int], version: str, retries: Retries) -> Flow[str]:
    """The text of token ids."""
    if not ids:
        return ""
    request = tensors.infer_request("detokenizer", version)
    tensors.add_input(request, "detokenize_ids", "INT32", list(ids), is_batched=True)
    # All are new, none is trimmed, and these are the last ones of request 0, which is no one's.
    state = [len(ids), 0, 0, 1, 0, 0]
    tensors.add_input(request, "detokenize_state", "INT64", state, is_batched=True)
    response = yield from retried("ModelInfer", request, retries)
    texts = tensors.outputs(response).get("text_output", [])
    if len(texts) != 1:
        raise ServerError(f"output text_output has {len(texts)} values; expected one")
    text: str = texts[0]
    return text


def describe(version: str, retries: Retries) -> Flow[ModelDescription]:
    """The model of the ensembles."""
    request = tensors.infer_request("tokenizer", version)
    tensors.add_input(request, "describe", "BOOL", True)
    request.outputs.add(name="description")
    response = yield from retried("ModelInfer", request, retries)
    try:
        (text,) = tensors.outputs(response).get("description", [])
        found = json.loads(text)
        return ModelDescription(
            model=found["model"],
            max_model_len=found["max_model_len"],
            vocab_size=found["vocab_size"],
            bos_token=found["bos_token"],
            eos_token=found["eos_token"],
            chat_template=found["chat_template"],
            special_tokens=tuple(found["special_tokens"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"output description cannot be read ({error!r})") from None
