"""A model that takes a text and returns a text: it tokenizes, is a front of the engine, and
detokenizes. Unlike an ensemble it notices itself that a client has left, may answer without an
output, and may be called without a stream where its transaction policy is not decoupled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inflight.core.request import TokenEvent
from inflight.errors import ConfigError, did_you_mean
from inflight.text.detokenize import Detokenizer
from inflight.triton import contract, protocol
from inflight.triton.completion.dialect import Dialect, TextResponseBuilder
from inflight.triton.completion.native import Native
from inflight.triton.completion.tensorrtllm import TensorrtLlm
from inflight.triton.completion.vllm import Vllm
from inflight.triton.contract import Array
from inflight.triton.engine_front import Call, EngineFront
from inflight.triton.sibling import llm_directory, load_tokenizer
from inflight.triton.tokenizer import (
    check_prompt,
    encode_text,
    max_prompt_bytes,
    start_warming,
)

DIALECTS: dict[str, Callable[[Mapping[str, str]], Dialect]] = {
    "native": lambda parameters: Native(),
    "vllm": lambda parameters: Vllm(),
    "tensorrtllm": TensorrtLlm,
}
"""Each is made from the parameters of config.pbtxt."""


class CompletionResponseBuilder:
    """The responses of a request.

    Args:
        text: the prompt.
        generation: the request.
        detokenizer: of the model.
        builder: of responses from texts.
    """

    def __init__(
        self,
        text: str,
        generation: protocol.Generation,
        detokenizer: Detokenizer,
        builder: TextResponseBuilder,
    ) -> None:
        self._prefix = text if generation.echo else ""
        self._generation = generation
        self._detokenizer = detokenizer
        self._builder = builder
        self.num_responses = builder.num_responses
        self._begun: set[int] = set()

    def responses(
        self, events: list[TokenEvent], request_ids: list[int]
    ) -> list[Mapping[str, Array]]:
        # One output carries the prompt's logprobs, and it may not be among the best.
        prompt_candidates = [one for event in events for one in event.prompt_candidates]
        parts = self._generation.answer(
            [protocol.OutputDelta(request_ids.index(one.request_id), one, []) for one in events]
        )
        texts = [self._text(event) for _, event, _ in parts]
        arrays = protocol.outputs(parts, len(self._generation.prompt_ids), prompt_candidates)
        return self._builder.responses(texts, arrays)

    def _text(self, event: TokenEvent) -> str:
        kept = self._generation.kept
        ids = protocol.shown_ids(event, kept) if kept else event.token_ids
        delta = self._detokenizer.delta_with_kept if kept else self._detokenizer.delta
        new = delta(event.window, ids, final=event.is_last, trim=event.trim)
        if not self._prefix or event.request_id in self._begun:
            return new
        self._begun.add(event.request_id)
        return self._prefix + new


class CompletionFront(EngineFront):
    """A model with the role `completion`.

    Args:
        directory: the model's folder, with an engine.json of its own unless `llm` names a sibling.
        parameters: of config.pbtxt: `dialect`, `llm`, `max_prompt_bytes`, `REPORT_CUSTOM_METRICS`
            of vLLM's backend, those of the dialect, and those of `EngineFront`.

    Raises:
        InflightError: a parameter is not allowed, or the engine cannot load.
    """

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        llm = llm_directory(directory, parameters) if "llm" in parameters else directory
        name = parameters.get("dialect", "native")
        if name not in DIALECTS:
            raise ConfigError(
                f"config.pbtxt: dialect is {name!r}; "
                f"allowed: {', '.join(DIALECTS)}{did_you_mean(name, DIALECTS)}"
            )
        self._dialect = DIALECTS[name](parameters)
        self.cancel_log_prefix = self._dialect.cancel_log_prefix
        self._max_bytes = max_prompt_bytes(parameters)
        self._tokenizer = load_tokenizer(llm)
        self._detokenizer = Detokenizer(self._tokenizer)
        start_warming(self._tokenizer.warm)
        if parameters.get("REPORT_CUSTOM_METRICS", "").lower() == "true":
            parameters = {"metrics_compat": "vllm", **parameters}
        super().__init__(llm, parameters)

    def read(
        self, inputs: Mapping[str, Array], parameters: dict[str, Any], limits: protocol.Limits
    ) -> Call:
        translation = self._dialect.read(inputs, parameters, self._tokenizer)
        text = translation.prompt.get(contract.TEXT_INPUT.name)
        if text is not None:
            check_prompt(text, contract.TEXT_INPUT.name, self._max_bytes)
        prompt = encode_text(self._tokenizer, translation.prompt)
        tensors = {
            **translation.inputs,
            contract.INPUT_IDS.name: np.array(prompt.ids, np.int32),
            contract.PROMPT_TENSOR.name: np.array([prompt.tensor.encode()], object),
        }
        if not self._is_decoupled:
            tensors["stream"] = np.array([False])  # Triton allows it one response
        with protocol.client_names(translation.names):
            generation = protocol.parse(tensors, translation.parameters, limits)
        generation = msgspec.structs.replace(generation, detokenized=False)
        if text is None and generation.echo:
            text = self._detokenizer.delta([], prompt.ids, final=True)
        builder = CompletionResponseBuilder(
            text or "",
            generation,
            self._detokenizer,
            translation.make_builder(generation),
        )
        return Call(generation, builder)
