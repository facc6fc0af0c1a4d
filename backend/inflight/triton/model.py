"""The class that Triton's Python backend loads; config.pbtxt selects the front."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils
from inflight import log
from inflight.errors import ConfigError, InflightError, did_you_mean
from inflight.text.chat import encode_chat, parse_messages
from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract
from inflight.triton.detokenizer import DetokenizerFront
from inflight.triton.llm import LlmFront
from inflight.triton.sibling import check_version
from inflight.triton.stub import close_shared_memory, exit_with_server, owner, start_heartbeat
from inflight.triton.tokenizer import TokenizerFront


class Front(Protocol):
    """Interface of a role."""

    def execute(self, requests: list[Any]) -> list[Any] | None: ...

    def finalize(self) -> None: ...


def _tokenizer(directory: Path, parameters: Mapping[str, str]) -> Front:
    return TokenizerFront(directory, parameters, contract.TEXT_INPUT, Tokenizer.encode)


def _chat_tokenizer(directory: Path, parameters: Mapping[str, str]) -> Front:
    return TokenizerFront(
        directory,
        parameters,
        contract.MESSAGES,
        lambda tokenizer, text: encode_chat(tokenizer, parse_messages(text)),
    )


_ROLES: dict[str, Callable[[Path, Mapping[str, str]], Front]] = {
    "llm": LlmFront,
    "tokenizer": _tokenizer,
    "chat_tokenizer": _chat_tokenizer,
    "detokenizer": DetokenizerFront,
}


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
            if role == "llm":
                check_version(folder, args.get("model_version", ""))
            self._front = _ROLES[role](folder, parameters)
        except InflightError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any] | None:
        assert self._front is not None  # Triton calls initialize first
        return self._front.execute(requests)

    def finalize(self) -> None:
        if self._front is not None:
            self._front.finalize()
