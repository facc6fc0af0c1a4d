"""Text to ids, and chats to ids: the first step of an ensemble."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils
from inflight.errors import ConfigError, EngineError, InflightError, RequestError
from inflight.text import template
from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract, protocol
from inflight.triton.errors import DelayedErrors
from inflight.triton.sibling import llm_directory, load_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MAX_PROMPT_BYTES = 1 << 20


class TokenizerFront:
    """Triton's models `tokenizer` and `chat_tokenizer`.

    Args:
        directory: the model's folder; its sibling `llm` is in the same repository.
        parameters: of config.pbtxt; `llm` names the sibling.
        tensor: the input to read.
        encode: from that input's text to ids.

    Raises:
        ConfigError: the sibling, its tokenizer or its chat template is missing.
    """

    def __init__(
        self,
        directory: Path,
        parameters: Mapping[str, str],
        tensor: contract.Tensor,
        encode: Callable[[Tokenizer, str], list[int]],
    ) -> None:
        self._tensor = tensor
        self._max_bytes = _max_prompt_bytes(parameters)
        self._encode = encode
        self._tokenizer = load_tokenizer(llm_directory(directory, parameters))
        self._errors = DelayedErrors()
        threading.Thread(target=self._warm, name="sandboxes", daemon=True).start()

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response to each request, or None if an error follows."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._errors.close()

    def _warm(self) -> None:
        try:
            if self._tensor is contract.MESSAGES:
                template.warm()
            self._tokenizer.warm()
        except InflightError:  # raised again with the first request that needs one
            logger.exception("a sandbox does not start")

    def _respond(self, request: Any) -> Any:
        wanted = request.requested_output_names()
        try:
            ids = self._ids(request)
        except InflightError as error:
            return self._refuse(request, wanted, error)
        except Exception:  # fails this request, not the others of the batch
            logger.exception("a prompt could not be tokenized")
            failure = EngineError("the prompt could not be tokenized")
            return self._refuse(request, wanted, failure)
        arrays = {
            contract.INPUT_IDS.name: np.array(ids, np.int32),
            contract.PROMPT_TENSOR.name: np.array([self._tensor.name.encode()], object),
            contract.NUM_INPUT_TOKENS.name: np.array([len(ids)], np.uint32),
        }
        return _response(arrays, wanted)

    def _refuse(self, request: Any, wanted: Collection[str], error: InflightError) -> Any:
        if _leaves_errors_to_llm(wanted):
            arrays = {
                contract.INPUT_IDS.name: np.array([], np.int32),
                contract.PROMPT_ERROR.name: protocol.write_prompt_error(error),
            }
            return _response(arrays, wanted)
        self._errors.send(request.get_response_sender(), error)
        return None

    def _ids(self, request: Any) -> list[int]:
        found = pb_utils.get_input_tensor_by_name(request, self._tensor.name)
        if found is None:
            raise RequestError("is missing", self._tensor.name)
        text: str = contract.read(self._tensor, found.as_numpy())
        if not text:
            raise RequestError("is empty; allowed: at least one character", self._tensor.name)
        # Before tokenizing: one instance serves all clients, and a megabyte takes half a second.
        size = len(text.encode())
        if size > self._max_bytes:
            raise RequestError(
                f"{size} bytes are too many; allowed: {self._max_bytes} "
                "(the parameter max_prompt_bytes of the tokenizer's config.pbtxt)",
                self._tensor.name,
            )
        return self._encode(self._tokenizer, text)


def _leaves_errors_to_llm(wanted: Collection[str]) -> bool:
    """Whether the request comes from an ensemble, whose step `llm` responds to a rejected prompt.
    Triton requests all outputs if a client names none, and an ensemble maps all but one."""
    return contract.PROMPT_ERROR.name in wanted and contract.NUM_INPUT_TOKENS.name not in wanted


def _response(arrays: Mapping[str, contract.Array], wanted: Collection[str]) -> Any:
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in wanted]
    )


def _max_prompt_bytes(parameters: Mapping[str, str]) -> int:
    text = parameters.get("max_prompt_bytes", str(DEFAULT_MAX_PROMPT_BYTES))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"config.pbtxt: max_prompt_bytes is {text!r}; allowed: 1 or more")
    return int(text)
