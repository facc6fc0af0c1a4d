"""Text to ids, and chats to ids: the first step of an ensemble."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils
from inflight.errors import ConfigError, EngineError, InflightError, RequestError
from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract
from inflight.triton.errors import triton_error
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
        ConfigError: the sibling or what is needed of its checkpoint is missing.
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

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        pass

    def _respond(self, request: Any) -> Any:
        try:
            ids = self._ids(request)
        except InflightError as error:
            return pb_utils.InferenceResponse(error=triton_error(error))
        except Exception:  # costs this request an error, and the others of the batch nothing
            logger.exception("a prompt could not be tokenized")
            failure = EngineError("the prompt could not be tokenized")
            return pb_utils.InferenceResponse(error=triton_error(failure))
        origin = np.array([self._tensor.name.encode()], object)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(contract.INPUT_IDS.name, np.array(ids, np.int32)),
                pb_utils.Tensor(contract.PROMPT_TENSOR.name, origin),
            ]
        )

    def _ids(self, request: Any) -> list[int]:
        found = pb_utils.get_input_tensor_by_name(request, self._tensor.name)
        if found is None:
            raise RequestError("is missing", self._tensor.name)
        text: str = contract.read(self._tensor, found.as_numpy())
        if not text:
            raise RequestError("is empty; allowed: at least one character", self._tensor.name)
        # Before tokenizing: one instance serves everybody, and a megabyte takes half a second.
        size = len(text.encode())
        if size > self._max_bytes:
            raise RequestError(
                f"{size} bytes are too many; allowed: {self._max_bytes} "
                "(the parameter max_prompt_bytes of the tokenizer's config.pbtxt)",
                self._tensor.name,
            )
        return self._encode(self._tokenizer, text)


def _max_prompt_bytes(parameters: Mapping[str, str]) -> int:
    text = parameters.get("max_prompt_bytes", str(DEFAULT_MAX_PROMPT_BYTES))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"config.pbtxt: max_prompt_bytes is {text!r}; allowed: 1 or more")
    return int(text)
