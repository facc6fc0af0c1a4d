"""inflight's own ensembles: `generate` for prompts, `chat` for messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from inflight_client import tensors
from inflight_client.layouts.layout import Generation, Prompt, Target
from inflight_client.options import (
    CHAT_INPUTS,
    PROMPT_INPUTS,
    Message,
    as_json,
    num_outputs,
    tensors_of,
)
from inflight_client.reader import Reader

GENERATE = "generate"
CHAT = "chat"


class Native:
    name = "native"
    models: tuple[str, ...] = (GENERATE,)

    def generate(
        self, target: Target, prompt: Prompt, stream: bool, options: Mapping[str, Any]
    ) -> Generation:
        tensor = ("text_input", "BYTES", prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            tensor = ("prompt_token_ids", "INT32", prompt)
        return _generation(target, tensor, stream, options, PROMPT_INPUTS)


def chat(
    target: Target, messages: Sequence[Message], stream: bool, options: Mapping[str, Any]
) -> Generation:
    """The request to complete a chat; other layouts have none of their own.

    Raises:
        InvalidRequest: an option does not exist or has an invalid value.
    """
    text = as_json("messages", list(messages))
    return _generation(target, ("messages", "BYTES", text), stream, options, CHAT_INPUTS)


def _generation(
    target: Target,
    tensor: tuple[str, str, Any],
    stream: bool,
    options: Mapping[str, Any],
    inputs: Mapping[str, str],
) -> Generation:
    request = tensors.infer_request(target.model, target.version)
    tensors.add_input(request, *tensor)
    tensors.add_input(request, "stream", "BOOL", stream)
    for one in tensors_of(options, inputs):
        tensors.add_input(request, *one)
    return Generation(request, functools.partial(Reader, num_outputs(options)))
