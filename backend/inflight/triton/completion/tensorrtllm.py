"""The tensors of the models `ensemble` and `tensorrt_llm_bls` of TensorRT-LLM's backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inflight.text.tokenizer import Tokenizer
from inflight.triton import contract
from inflight.triton.completion.dialect import Translation, read_prompt, strings
from inflight.triton.contract import Array, Tensor
from inflight.triton.dialects import request_parameters
from inflight.triton.protocol import Generation
from inflight.triton.tensorrtllm import options

_BIAS_WORDS = Tensor("embedding_bias_words", "STRING", "Texts whose tokens are biased.", dims=-1)
_BIAS_WEIGHTS = Tensor("embedding_bias_weights", "FP32", "Bias of each text's tokens.", dims=-1)
_MAX_TOKENS = Tensor("max_tokens", "INT32", "Maximum number of output tokens.", required=True)
_COUNTS = ("num_input_tokens", "num_output_tokens")


class TensorrtLlmResponseBuilder:
    """One response for each output, or for all beams of a search.

    Args:
        generation: the request.
        requested: outputs that flags request.
    """

    def __init__(self, generation: Generation, requested: frozenset[str]) -> None:
        self._has_beams = generation.params.beam_width > 1
        self.num_responses = 1 if self._has_beams else generation.n
        self._has_log_probs = generation.params.num_logprobs is not None
        self._requested = requested

    def responses(self, texts: list[str], arrays: Mapping[str, Array]) -> list[Mapping[str, Array]]:
        places = range(len(texts))
        groups = [list(places)] if self._has_beams else [[place] for place in places]
        return [self._response(texts, arrays, group) for group in groups]

    def _response(
        self, texts: list[str], arrays: Mapping[str, Array], places: list[int]
    ) -> dict[str, Array]:
        found = {
            # Without a batch dimension, unlike all others: clients take element 0 as the text.
            "text_output": strings([texts[place] for place in places]),
            "batch_index": np.zeros((1, 1), np.int32),
            "sequence_index": np.array([[arrays["index"][places[0]]]], np.int32),
        }
        counts = {
            "num_input_tokens": arrays["num_input_tokens"],
            "num_output_tokens": arrays["num_output_tokens"][places],
        }
        for name in self._requested:
            found[name] = counts[name].astype(np.int32)[np.newaxis]
        if self._has_log_probs:
            found |= options.log_probs(
                [arrays["logprobs"][place].decode() for place in places],
                [arrays["cumulative_logprob"][place] for place in places],
            )
        return found


class TensorrtLlm:
    """Without a stream the prompt precedes the output unless it is excluded; in a stream it never
    does. Unknown request parameters are ignored.

    Args:
        parameters: of config.pbtxt; `exclude_input_in_output` is the default of that input.

    Raises:
        ConfigError: it is not a flag.
    """

    cancel_log_prefix = ""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._excludes_input = options.excludes_input(parameters)

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], tokenizer: Tokenizer
    ) -> Translation:
        given = options.unbatched(inputs)
        prompt = read_prompt(given)
        contract.read_required(_MAX_TOKENS, given)
        passed = options.options(given)
        stream = contract.read_flag("stream", given)
        passed[options.EXCLUDE_INPUT] = options.excluded(given, stream, self._excludes_input)
        biases = options.word_biases(_BIAS_WORDS, _BIAS_WEIGHTS, given, tokenizer)
        if biases:
            passed |= options.logit_biases(biases)
        requested = frozenset(
            name for name in _COUNTS if contract.read_flag(f"return_{name}", given)
        )
        known = {
            name: value for name, value in parameters.items() if name in request_parameters.NAMES
        }
        return Translation(
            prompt,
            passed,
            known,
            lambda generation: TensorrtLlmResponseBuilder(generation, requested),
            options.client_names(given),
        )
