"""What the models `preprocessing` and `postprocessing` share: they respond at once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from inflight.errors import EngineError, InflightError
from inflight.triton.contract import Array
from inflight.triton.errors import DelayedErrors
from inflight.triton.sibling import llm_directory, load_tokenizer
from inflight.triton.tensorrtllm.options import unbatched

logger = logging.getLogger(__name__)


class TextFront(ABC):
    """A model between text and token ids.

    Args:
        directory: the model's folder; the model with the engine is in the same repository.
        parameters: of config.pbtxt; `llm` names that model.

    Raises:
        ConfigError: that model or its tokenizer is missing.
    """

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        self._tokenizer = load_tokenizer(llm_directory(directory, parameters))
        self._errors = DelayedErrors()

    @abstractmethod
    def convert(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The outputs of a request.

        Args:
            inputs: without their batch dimension.

        Raises:
            RequestError: an input is not allowed.
        """

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response to each request, or None if an error follows."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._errors.close()

    def _respond(self, request: Any) -> Any:
        wanted = request.requested_output_names()
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            arrays = self.convert(unbatched(inputs))
        except InflightError as error:
            self._errors.send(request.get_response_sender(), error)
            return None
        except Exception:  # fails this request, not the others of the batch
            logger.exception("a request could not be converted")
            failure = EngineError("the request could not be converted")
            self._errors.send(request.get_response_sender(), failure)
            return None
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in wanted]
        )
