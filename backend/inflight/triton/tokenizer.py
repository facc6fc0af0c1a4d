"""Text to ids, and chats to ids: the first step of an ensemble."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import triton_python_backend_utils as pb_utils
from inflight.core.file_signature import Signature, signature
from inflight.errors import ConfigError, EngineError, InflightError, RequestError
from inflight.ipc.engine_client import engine_config_path
from inflight.text import template
from inflight.text.chat import encode_chat
from inflight.text.messages import parse_messages, parse_tools, parse_variables
from inflight.text.template import Conversation
from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract, protocol
from inflight.triton.errors import DelayedErrors
from inflight.triton.sibling import describe, llm_directory, load_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MAX_PROMPT_BYTES = 1 << 20


class Prompt(NamedTuple):
    """A prompt's ids, and the name of the input that it came from."""

    tensor: str
    ids: list[int]


class TokenizerFront:
    """Triton's models `tokenizer` and `chat_tokenizer`.

    Args:
        directory: the model's folder; its sibling `llm` is in the same repository.
        parameters: of config.pbtxt; `llm` names the sibling.
        name: of the model in `contract.MODELS`.
        encode: from checked inputs by name to the name of the input with the prompt, and its ids.

    Raises:
        ConfigError: the sibling, its tokenizer or its chat template is missing.
    """

    def __init__(
        self,
        directory: Path,
        parameters: Mapping[str, str],
        name: str,
        encode: Callable[[Tokenizer, Mapping[str, Any]], Prompt],
    ) -> None:
        self._inputs = {tensor.name: tensor for tensor in contract.MODELS[name].inputs}
        self._max_bytes = max_prompt_bytes(parameters)
        self._encode = encode
        self._llm = llm_directory(directory, parameters)
        self._tokenizer = load_tokenizer(self._llm)
        self._described: tuple[Signature, contract.Array] | None = None
        self._errors = DelayedErrors()
        chat = [template.warm] if contract.MESSAGES.name in self._inputs else []
        start_warming(*chat, self._tokenizer.warm)

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response to each request, or None if an error follows."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._errors.close()

    def _respond(self, request: Any) -> Any:
        wanted = request.requested_output_names()
        try:
            values = self._values(request)
            if values.get(contract.DESCRIBE.name):
                return _response({contract.DESCRIPTION.name: self._description()}, wanted)
            prompt = self._encode(self._tokenizer, values)
        except InflightError as error:
            return self._refuse(request, wanted, error)
        except Exception:  # fails this request, not the others of the batch
            logger.exception("a prompt could not be tokenized")
            failure = EngineError("the prompt could not be tokenized")
            return self._refuse(request, wanted, failure)
        arrays = {
            contract.INPUT_IDS.name: np.array(prompt.ids, np.int32),
            contract.PROMPT_TENSOR.name: np.array([prompt.tensor.encode()], object),
            contract.NUM_INPUT_TOKENS.name: np.array([len(prompt.ids)], np.uint32),
        }
        return _response(arrays, wanted)

    def _refuse(self, request: Any, wanted: Collection[str], error: InflightError) -> Any:
        if _leaves_errors_to_llm(wanted):
            arrays = {
                contract.INPUT_IDS.name: np.array([], np.int32),
                contract.PROMPT_ERROR.name: protocol.write_error(error),
            }
            return _response(arrays, wanted)
        self._errors.send(request.get_response_sender(), error)
        return None

    def _description(self) -> contract.Array:
        # An engine that restarts reads its settings again, so they are read if they have changed.
        version = signature(engine_config_path(self._llm))
        if self._described is None or self._described[0] != version:
            try:
                found = describe(self._llm, self._tokenizer)
            except ConfigError:  # names files
                logger.exception("the model cannot be described")
                raise ConfigError(
                    "the model cannot be described; the server's log has the reason"
                ) from None
            self._described = version, np.array([json.dumps(found).encode()], object)
        return self._described[1]

    def _values(self, request: Any) -> dict[str, Any]:
        """The inputs of a request, checked."""
        values: dict[str, Any] = {}
        size = 0
        for found in request.inputs():
            tensor = self._inputs[found.name()]
            value = values[tensor.name] = contract.read(tensor, found.as_numpy())
            if tensor.datatype == "STRING":
                size = check_prompt(value, tensor.name, self._max_bytes, size)
        return values


def encode_text(tokenizer: Tokenizer, values: Mapping[str, Any]) -> Prompt:
    """The prompt of the model `tokenizer`: a text, or ids as they are.

    Raises:
        RequestError: neither of them, or both.
    """
    text, ids = values.get(contract.TEXT_INPUT.name), values.get(contract.PROMPT_TOKEN_IDS.name)
    if text is not None and ids is not None:
        raise RequestError("is set beside text_input; send one of them", "prompt_token_ids")
    if ids is not None:
        return Prompt(contract.PROMPT_TOKEN_IDS.name, ids)
    if text is None:
        raise RequestError("is missing", contract.TEXT_INPUT.name)
    adds = values.get(contract.ADD_SPECIAL_TOKENS.name, True)
    return Prompt(contract.TEXT_INPUT.name, tokenizer.encode(text, adds))


def encode_messages(tokenizer: Tokenizer, values: Mapping[str, Any]) -> Prompt:
    """The prompt of the model `chat_tokenizer`.

    Raises:
        RequestError: as `text.messages` and `encode_chat`.
    """
    text = values.get(contract.MESSAGES.name)
    if text is None:
        raise RequestError("is missing", contract.MESSAGES.name)
    tools, variables = (
        values.get(tensor.name) for tensor in (contract.TOOLS, contract.CHAT_TEMPLATE_KWARGS)
    )
    continues = values.get(contract.CONTINUE_FINAL_MESSAGE.name, False)
    conversation = Conversation(
        parse_messages(text),
        None if tools is None else parse_tools(tools),
        {} if variables is None else parse_variables(variables),
        values.get(contract.ADD_GENERATION_PROMPT.name, not continues),
    )
    ids = encode_chat(tokenizer, conversation, continue_final_message=continues)
    return Prompt(contract.MESSAGES.name, ids)


def text_tokenizer(directory: Path, parameters: Mapping[str, str]) -> TokenizerFront:
    """The front of the model `tokenizer`. Raises ConfigError."""
    return TokenizerFront(directory, parameters, "tokenizer", encode_text)


def chat_tokenizer(directory: Path, parameters: Mapping[str, str]) -> TokenizerFront:
    """The front of the model `chat_tokenizer`. Raises ConfigError."""
    return TokenizerFront(directory, parameters, "chat_tokenizer", encode_messages)


def _leaves_errors_to_llm(wanted: Collection[str]) -> bool:
    """Whether the request comes from an ensemble, whose step `llm` responds to a rejected prompt.
    Triton requests all outputs if a client names none, and an ensemble maps all but one."""
    return contract.PROMPT_ERROR.name in wanted and contract.NUM_INPUT_TOKENS.name not in wanted


def _response(arrays: Mapping[str, contract.Array], wanted: Collection[str]) -> Any:
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in wanted]
    )


def max_prompt_bytes(parameters: Mapping[str, str]) -> int:
    """The parameter of a config.pbtxt. Raises ConfigError: it is not allowed."""
    text = parameters.get("max_prompt_bytes", str(DEFAULT_MAX_PROMPT_BYTES))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"config.pbtxt: max_prompt_bytes is {text!r}; allowed: 1 or more")
    return int(text)


def check_prompt(text: str, name: str, max_bytes: int, num_before: int = 0) -> int:
    """The number of bytes of a request's text, with those before this part.

    Args:
        name: of its tensor.
        num_before: bytes of the request's parts before this one.

    Raises:
        RequestError: it is empty or too long.
    """
    if not text:
        raise RequestError("is empty; allowed: at least one character", name)
    # Before tokenizing: one instance serves all clients, and a megabyte takes half a second.
    size = num_before + len(text.encode())
    if size > max_bytes:
        raise RequestError(
            f"{size} bytes are too many; allowed: {max_bytes} "
            "(the parameter max_prompt_bytes of the tokenizer's config.pbtxt)",
            name,
        )
    return size


def start_warming(*warms: Callable[[], None]) -> None:
    """Start sandboxes on a thread, before the first request needs them."""

    def run() -> None:
        try:
            for warm in warms:
                warm()
        except InflightError:  # raised again with the first request that needs one
            logger.exception("a sandbox does not start")

    threading.Thread(target=run, name="sandboxes", daemon=True).start()
