"""Messages and options, and the tensors that they travel as."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from inflight_client.errors import InvalidRequest
from inflight_client.option_table import DATATYPES, Options
from inflight_client.tensors import shown

Tensor = tuple[str, str, Any]
"""Name, datatype, and value or list of values."""


class _Turn(TypedDict):
    role: str
    content: str | Sequence[Mapping[str, Any]] | None


class Message(_Turn, total=False):
    """One turn of a chat, in OpenAI's form.

    role: `system`, `user`, `assistant` or `tool`. content: a text, a list of text parts, or None
    beside tool_calls.
    """

    name: str
    reasoning_content: str
    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str


class PromptInputs(TypedDict, total=False):
    """How a prompt is tokenized."""

    add_special_tokens: bool
    """False leaves out the beginning-of-sequence token and others of the tokenizer."""


class ChatInputs(TypedDict, total=False):
    """How a chat is rendered."""

    tools: Sequence[Mapping[str, Any]] | str
    """OpenAI's tool objects, for the chat template."""
    chat_template_kwargs: Mapping[str, Any] | str
    """Further variables of the chat template, such as {"enable_thinking": False}."""
    add_generation_prompt: bool
    """False leaves out the beginning of the assistant's turn."""
    continue_final_message: bool
    """True continues the last message instead of beginning a turn."""


class TokenizeOptions(PromptInputs, ChatInputs, total=False):
    """Options of the tokenization of a text or a chat."""


class PromptOptions(Options, PromptInputs, total=False):
    """Options of a completion of a prompt."""


class ChatOptions(Options, ChatInputs, total=False):
    """Options of a completion of a chat."""


PROMPT_INPUTS = {"add_special_tokens": "BOOL"}
CHAT_INPUTS = {
    "tools": "BYTES",
    "chat_template_kwargs": "BYTES",
    "add_generation_prompt": "BOOL",
    "continue_final_message": "BOOL",
}

# Options whose values may be objects of these types, which are encoded as JSON.
_JSON: dict[str, tuple[type, ...]] = {
    "sampling_parameters": (Mapping,),
    "guided_decoding_guide": (Mapping, list, tuple),
    "tools": (list, tuple),
    "chat_template_kwargs": (Mapping,),
}


def tensors_of(options: Mapping[str, Any], inputs: Mapping[str, str]) -> Iterator[Tensor]:
    """Each tensor that encodes options.

    Args:
        options: of a request.
        inputs: datatypes of further inputs of its model.

    Raises:
        InvalidRequest: there is no such option, or it cannot be encoded as tensors.
    """
    for name, value in options.items():
        if name == "logit_bias":
            yield from _biases(value, options)
        else:
            yield _tensor(name, value, {**DATATYPES, **inputs})


def extra_tensors(options: Mapping[str, Any], inputs: Mapping[str, str]) -> Iterator[Tensor]:
    """Each tensor that encodes options of a model whose only ones are `inputs`.

    Raises:
        InvalidRequest: there is no such option, or it cannot be encoded as tensors.
    """
    for name, value in options.items():
        yield _tensor(name, value, inputs)


def num_outputs(options: Mapping[str, Any]) -> int:
    """The requested n, as an option or in sampling_parameters; 1 if it is not a number, which the
    server rejects."""
    asked = options.get("n")
    try:
        if asked is None and (parameters := options.get("sampling_parameters")):
            parsed = json.loads(parameters) if isinstance(parameters, str) else parameters
            asked = parsed.get("n")
        return 1 if asked is None else int(asked)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1


def as_json(name: str, value: Any) -> str:
    """`value` as JSON.

    Raises:
        InvalidRequest: it cannot be written so.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{name}: {shown(value)} cannot be written as JSON ({error})"
        ) from None


def no_option(name: str, allowed: Sequence[str]) -> InvalidRequest:
    """The error for an option that does not exist."""
    if name == "stream":
        return InvalidRequest(
            "stream is not an option: stream() and chat_stream() stream, the others do not"
        )
    close = difflib.get_close_matches(name, allowed, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    return InvalidRequest(f"{name} is not an option{meant} allowed: {', '.join(allowed)}")


def _tensor(name: str, value: Any, datatypes: Mapping[str, str]) -> Tensor:
    if name not in datatypes:
        biases = ["logit_bias"] if "logit_bias_ids" in datatypes else []
        raise no_option(name, [*datatypes, *biases])
    if isinstance(value, _JSON.get(name, ())):
        value = as_json(name, value)
    return name, datatypes[name], value


def _biases(biases: Any, options: Mapping[str, Any]) -> Iterator[Tensor]:
    names = ("logit_bias_ids", "logit_bias_values")
    if not isinstance(biases, Mapping):
        raise InvalidRequest(
            f"logit_bias: {shown(biases)} is not a mapping of token ids to numbers"
        )
    if any(name in options for name in names):
        raise InvalidRequest(f"logit_bias cannot be combined with {' and '.join(names)}")
    for name, values in zip(names, (list(biases), list(biases.values())), strict=True):
        yield name, DATATYPES[name], values
