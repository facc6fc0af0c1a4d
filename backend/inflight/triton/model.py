"""The class that Triton's Python backend loads; config.pbtxt selects the front."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils
from inflight import log
from inflight.errors import ConfigError, InflightError, did_you_mean
from inflight.triton.sibling import check_version
from inflight.triton.stub import close_shared_memory, exit_with_server, owner, start_heartbeat


class Front(Protocol):
    """Interface of a role."""

    def execute(self, requests: list[Any]) -> list[Any] | None: ...

    def finalize(self) -> None: ...


# Where the front of each role is: a process has one role, and imports no other.
_ROLES = {
    "llm": "inflight.triton.llm:LlmFront",
    "tokenizer": "inflight.triton.tokenizer:text_tokenizer",
    "chat_tokenizer": "inflight.triton.tokenizer:chat_tokenizer",
    "detokenizer": "inflight.triton.detokenizer:DetokenizerFront",
    "completion": "inflight.triton.completion.front:CompletionFront",
    "tensorrt_llm": "inflight.triton.tensorrtllm.llm:TensorrtLlmFront",
    "preprocessing": "inflight.triton.tensorrtllm.preprocessing:PreprocessingFront",
    "postprocessing": "inflight.triton.tensorrtllm.postprocessing:PostprocessingFront",
}


def _front(role: str, directory: Path, parameters: Mapping[str, str]) -> Front:
    module, _, name = _ROLES[role].partition(":")
    make: Callable[[Path, Mapping[str, str]], Front] = getattr(import_module(module), name)
    return make(directory, parameters)


class TritonPythonModel:
    """One instance of a model with `backend: "inflight"`; parameter `role` selects the front."""

    _front: Front | None = None

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        # The config.pbtxt files are complete.
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load.

        Raises:
            TritonModelException: the model cannot load; Triton reports why.
        """
        config = json.loads(args["model_config"])
        parameters = {
            name: value["string_value"] for name, value in config.get("parameters", {}).items()
        }
        policy = config.get("model_transaction_policy") or {}
        parameters["decoupled"] = "true" if policy.get("decoupled") else "false"
        try:
            log.begin()
            close_shared_memory()
            exit_with_server()
            its_owner = owner()
            if its_owner.is_supervisor:
                start_heartbeat(its_owner)
            role = parameters.get("role", "")
            if role not in _ROLES:
                raise ConfigError(
                    f"config.pbtxt: the parameter 'role' is {role!r}; "
                    f"allowed: {', '.join(_ROLES)}{did_you_mean(role, _ROLES)}"
                )
            folder = Path(args["model_repository"])
            if role in ("llm", "completion", "tensorrt_llm") and "llm" not in parameters:
                check_version(folder, args.get("model_version", ""))
            self._front = _front(role, folder, parameters)
        except InflightError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any] | None:
        assert self._front is not None  # Triton calls initialize first
        return self._front.execute(requests)

    def finalize(self) -> None:
        if self._front is not None:
            self._front.finalize()
