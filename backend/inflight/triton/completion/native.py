"""The tensors of the ensemble `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.text.tokenizer import Tokenizer
from inflight.triton.completion.dialect import Translation, read_prompt, strings
from inflight.triton.contract import MODELS, TEXT_OUTPUT, Array


class NativeResponseBuilder:
    """Responses as those of `generate`."""

    num_responses = 1

    def responses(self, texts: list[str], arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        # The text comes first: clients of /infer take the first output for it.
        return [{TEXT_OUTPUT.name: strings(texts), **arrays}]


class Native:
    """Requests and responses as those of `generate`."""

    cancel_log_prefix = ""
    contract = MODELS["generate"]

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], tokenizer: Tokenizer
    ) -> Translation:
        prompt = read_prompt(inputs)
        options = {name: array for name, array in inputs.items() if name not in prompt}
        return Translation(prompt, options, parameters, lambda generation: NativeResponseBuilder())
