"""The layout of vllm_backend: one model, with options as one JSON object."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from inflight_client import tensors
from inflight_client.completion import Delta, read_logprobs
from inflight_client.errors import InvalidRequest
from inflight_client.layouts.layout import Generation, Prompt, Target, refuse_token_ids, refused
from inflight_client.options import as_json, num_outputs
from inflight_client.reader import Reader
from inflight_client.tensors import shown

# Options under their names in vLLM's SamplingParams.
_PARAMETERS = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "min_length": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "seed": "seed",
    "stop_words": "stop",
    "bad_words": "bad_words",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "num_logprobs": "logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
    "n": "n",
}
# Of guides, in StructuredOutputsParams.
_GUIDES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "choice": "choice",
}
# "None" is of an output that continues.
_REASONS = {"": None, "None": None, "abort": "cancelled"}
_SWITCHES = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
# Options that are tensors of their own, need nothing, or are combined with others.
_APART = frozenset(
    {
        *_SWITCHES,
        *("sampling_parameters", "end_id", "exclude_input_in_output", "echo", "return_logprobs"),
    }
)


class Vllm:
    name = "vllm"
    models: tuple[str, ...] = ("vllm_model",)

    def generate(
        self, target: Target, prompt: Prompt, stream: bool, options: Mapping[str, Any]
    ) -> Generation:
        refuse_token_ids(prompt, self.name)
        parameters = _parameters(options)
        request = tensors.infer_request(target.model, target.version)
        tensors.add_input(request, "text_input", "BYTES", prompt)
        tensors.add_input(request, "stream", "BOOL", stream)
        excludes = options.get("exclude_input_in_output", not options.get("echo", False))
        tensors.add_input(request, "exclude_input_in_output", "BOOL", excludes)
        sampling = as_json("sampling_parameters", parameters)
        tensors.add_input(request, "sampling_parameters", "BYTES", sampling)
        for name in _SWITCHES:
            tensors.add_input(request, name, "BOOL", True)
        if parameters.get("logprobs") is not None:
            tensors.add_input(request, "return_logprobs", "BOOL", True)
        return Generation(request, functools.partial(_Reader, num_outputs(options)))


def _parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """The object of SamplingParams."""
    given = _given(options.get("sampling_parameters"))
    parameters: dict[str, Any] = {}
    for name, value in options.items():
        if name in _PARAMETERS:
            parameters[_PARAMETERS[name]] = value
        elif name == "return_log_probs":
            if value:
                parameters.setdefault("logprobs", 0)
        elif name.startswith("guided_decoding_"):
            # A JSON text within the JSON object, as vllm_backend reads it.
            parameters["structured_outputs"] = as_json(name, _guide(options))
        elif name not in _APART:
            remedy = "use logit_bias" if name.startswith("logit_bias_") else ""
            raise refused(name, Vllm.name, remedy)
    if "end_id" in options:
        parameters["stop_token_ids"] = [*options.get("stop_token_ids", ()), options["end_id"]]
    if twice := sorted(given.keys() & parameters.keys()):
        raise InvalidRequest(
            f"sampling_parameters: {twice[0]} is also set by an option; allowed: one of the two"
        )
    return {**given, **parameters}


def _given(parameters: Any) -> Mapping[str, Any]:
    if parameters is None:
        return {}
    try:
        found = json.loads(parameters) if isinstance(parameters, str) else parameters
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"sampling_parameters: {shown(parameters)} is not a JSON object")
    return found


def _guide(options: Mapping[str, Any]) -> dict[str, Any]:
    """StructuredOutputsParams."""
    kind = options.get("guided_decoding_guide_type")
    guide = options.get("guided_decoding_guide")
    if kind == "json":
        return {"json_object": True}
    if kind not in _GUIDES:
        raise InvalidRequest(
            f"guided_decoding_guide_type: is {kind!r}; allowed: json, {', '.join(_GUIDES)}"
        )
    if guide is None:
        raise InvalidRequest(f"guided_decoding_guide: is missing; the type {kind} requires it")
    if kind == "choice" and isinstance(guide, str):
        try:
            guide = json.loads(guide)
        except (ValueError, RecursionError):
            guide = None
        if not isinstance(guide, Sequence):
            raise InvalidRequest("guided_decoding_guide: is not a JSON list of choices")
    return {_GUIDES[kind]: guide}


class _Reader(Reader):
    """A response has a value for each output, in their order: also of those that have finished and
    those without new tokens."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__(num_outputs)
        self._finished: set[int] = set()

    def _deltas(self, values: dict[str, list[Any]]) -> list[Delta]:
        texts = values.get("text_output", [])

        def of(name: str, otherwise: Any) -> list[Any]:
            found = values.get(name, [])
            return found if len(found) == len(texts) else [otherwise] * len(texts)

        (num_input_tokens, *_) = values.get("num_input_tokens", [0])
        deltas = []
        for place, (text, reason, count, logprobs) in enumerate(
            zip(
                texts,
                of("finish_reason", ""),
                of("num_output_tokens", 0),
                of("logprobs", ""),
                strict=True,
            )
        ):
            if place in self._finished:
                continue
            ended = _REASONS.get(reason, reason)
            if ended is not None:
                self._finished.add(place)
            found = () if logprobs == "null" else read_logprobs(logprobs)
            if not (text or count or ended or found):
                continue
            deltas.append(Delta(text, ended, num_input_tokens, count, found, place))
        return deltas
