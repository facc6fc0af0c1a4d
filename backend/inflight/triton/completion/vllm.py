"""The tensors of vLLM's backend for Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inflight.errors import RequestError
from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract
from inflight.triton.completion.dialect import Translation, read_prompt, strings
from inflight.triton.contract import Array, Contract, Tensor
from inflight.triton.dialects import sampling_parameters
from inflight.triton.protocol import Generation

MAX_TOKENS = 16
"""Default of vLLM, as is a temperature of 1."""
_DEFAULTS: Mapping[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0}

_ECHO = "exclude_input_in_output"
# In the words of vLLM's backend, whose clients compare them.
_ECHO_IN_STREAM = f"Error generating stream: When streaming, `{_ECHO}` = False is not allowed."
_OPTIONAL = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
"""Outputs that a response has only if a flag requests them."""
_UNSUPPORTED = {
    "image": "only text is supported",
    "embedding_request": "embeddings are not supported",
}
_REASONS = {"": "None", "cancelled": "abort"}


class VllmResponseBuilder:
    """Each response has an element for each of the n outputs, with the text that is new.

    Args:
        generation: the request.
        requested: outputs besides the text.
    """

    num_responses = 1

    def __init__(self, generation: Generation, requested: frozenset[str]) -> None:
        count = generation.n
        self._requested = requested
        self._no_logprobs = "null" if generation.params.num_logprobs is None else "[]"
        self._reasons = [_REASONS[""]] * count
        self._cumulative_logprobs = [0.0] * count

    def responses(self, texts: list[str], arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        count = len(self._reasons)
        all_texts, logprobs, counts = [""] * count, [self._no_logprobs] * count, [0] * count
        for place, output in enumerate(arrays["index"].tolist()):
            all_texts[output] = texts[place]
            reason = arrays["finish_reason"][place].decode()
            self._reasons[output] = _REASONS.get(reason, reason)
            self._cumulative_logprobs[output] = arrays["cumulative_logprob"][place]
            logprobs[output] = arrays["logprobs"][place].decode() or self._no_logprobs
            counts[output] = arrays["num_output_tokens"][place]
        found = {
            "finish_reason": strings(self._reasons),
            "cumulative_logprob": np.array(self._cumulative_logprobs, np.float32),
            "logprobs": strings(logprobs),
            "num_input_tokens": arrays["num_input_tokens"],
            "num_output_tokens": np.array(counts, np.uint32),
        }
        requested = {name: array for name, array in found.items() if name in self._requested}
        return [{"text_output": strings(all_texts), **requested}]


class Vllm:
    """Options come from `sampling_parameters`, or without it from the request parameters. Without a
    stream the prompt precedes the output unless it is excluded; with one it cannot."""

    cancel_log_prefix = "[vllm]"
    contract = Contract(
        (
            contract.TEXT_INPUT,
            Tensor("image", "STRING", "Not supported.", dims=-1),
            Tensor("stream", "BOOL", "Respond as tokens arrive."),
            Tensor("sampling_parameters", "STRING", "JSON object of options."),
            Tensor(_ECHO, "BOOL", "False prepends the prompt; the default without a stream."),
            *(Tensor(name, "BOOL", f"Return {output}.") for name, output in _OPTIONAL.items()),
            Tensor("embedding_request", "STRING", "Not supported."),
        ),
        (
            contract.TEXT_OUTPUT,
            Tensor("finish_reason", "STRING", "stop, length or abort; None until then.", dims=-1),
            Tensor("cumulative_logprob", "FP32", "Sum of the log-probabilities.", dims=-1),
            Tensor("logprobs", "STRING", "JSON list of the new tokens, or null.", dims=-1),
            contract.NUM_INPUT_TOKENS,
            Tensor("num_output_tokens", "UINT32", "New tokens.", dims=-1),
        ),
    )

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], tokenizer: Tokenizer
    ) -> Translation:
        for name, reason in _UNSUPPORTED.items():
            if name in inputs:
                raise RequestError(f"is not supported: {reason}; omit it", name)
        prompt = read_prompt(inputs)
        stream = bool(contract.read_flag("stream", inputs))
        exclude = contract.read_flag(_ECHO, inputs)
        if stream and exclude is False:
            raise RequestError(_ECHO_IN_STREAM)
        passed = {"stream": np.array([stream]), _ECHO: np.array([bool(exclude or stream)])}
        sampling = sampling_parameters.PARAM
        if sampling in inputs:
            passed[sampling] = inputs[sampling]
            parameters = {}
        requested = frozenset(
            output for flag, output in _OPTIONAL.items() if contract.read_flag(flag, inputs)
        )
        return Translation(
            prompt,
            passed,
            {**_DEFAULTS, **parameters},
            lambda generation: VllmResponseBuilder(generation, requested),
        )
