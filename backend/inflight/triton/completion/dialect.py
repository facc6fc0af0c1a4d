"""What a dialect provides: it translates between a client's tensors and those of `llm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract
from inflight.triton.contract import Array
from inflight.triton.protocol import Generation


class TextResponseBuilder(Protocol):
    """Builds the responses of a request; may keep state from one response to the next.

    Attributes:
        num_responses: without a stream.
    """

    num_responses: int

    def responses(self, texts: list[str], arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        """The tensors of one response, or of several in order.

        Args:
            texts: new text of each output in it.
            arrays: of the same outputs, from `protocol.outputs`.
        """


@dataclass(frozen=True, slots=True)
class Translation:
    """A request in the terms of the model `llm`.

    Attributes:
        prompt: values of `contract.TEXT_PROMPT`, by name.
        inputs: further inputs of `llm`.
        parameters: request parameters.
        make_builder: of the responses to a checked request.
        names: the client's names of inputs that it calls differently.
    """

    prompt: Mapping[str, Any]
    inputs: Mapping[str, Array]
    parameters: Mapping[str, Any]
    make_builder: Callable[[Generation], TextResponseBuilder]
    names: Mapping[str, str] = field(default_factory=dict)


class Dialect(Protocol):
    """The interface of another server's model.

    Attributes:
        cancel_log_prefix: of log lines of requests that clients cancel, if that server writes them;
            empty if not.
    """

    cancel_log_prefix: str

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], tokenizer: Tokenizer
    ) -> Translation:
        """Translate a request.

        Args:
            inputs: tensors by the client's names.
            parameters: Triton's request parameters.
            tokenizer: of the model.

        Raises:
            RequestError: an input is not allowed, or not supported; names it.
        """


def read_prompt(inputs: Mapping[str, Array]) -> dict[str, Any]:
    """The values of `contract.TEXT_PROMPT` that a request has.

    Raises:
        RequestError: one is not of its datatype and shape.
    """
    return {
        tensor.name: contract.read(tensor, inputs[tensor.name])
        for tensor in contract.TEXT_PROMPT
        if tensor.name in inputs
    }


def strings(texts: list[str]) -> Array:
    """A STRING[N]."""
    return np.array([text.encode() for text in texts], object)
