"""The model `preprocessing` of TensorRT-LLM's backend: text to the inputs of `tensorrt_llm`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np

from inflight.triton import contract
from inflight.triton.contract import Array, Tensor
from inflight.triton.tensorrtllm import options
from inflight.triton.tensorrtllm.text_front import TextFront
from inflight.triton.tokenizer import check_prompt, max_prompt_bytes

_QUERY = Tensor("QUERY", "STRING", "The prompt.", required=True)
_OUTPUT_LEN = Tensor("REQUEST_OUTPUT_LEN", "INT32", "Maximum number of tokens.", required=True)
_BIAS_WORDS = Tensor("EMBEDDING_BIAS_WORDS", "STRING", "Texts with a bias.", dims=-1)
_BIAS_WEIGHTS = Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", "Their biases.", dims=-1)
_WORDS = {"STOP_WORDS_DICT": "STOP_WORDS_IDS", "BAD_WORDS_DICT": "BAD_WORDS_IDS"}
_SPECIAL = {"END_ID": "OUT_END_ID", "PAD_ID": "OUT_PAD_ID"}


class PreprocessingFront(TextFront):
    """A model with the role `preprocessing`.

    Args:
        parameters: `max_prompt_bytes`, and those of `TextFront`.
    """

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        self._max_bytes = max_prompt_bytes(parameters)
        super().__init__(directory, parameters)

    def convert(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        text: str = contract.read_required(_QUERY, inputs)
        output_len = contract.read_required(_OUTPUT_LEN, inputs)
        check_prompt(text, _QUERY.name, self._max_bytes)
        ids = self._tokenizer.encode(text, True, _QUERY.name)
        found = {
            "INPUT_ID": np.array([ids], np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], np.int32),
            "REQUEST_OUTPUT_LEN": np.array([[output_len]], np.int32),
            "EMBEDDING_BIAS": self._biases(inputs),
        }
        for name, output in _WORDS.items():
            found[output] = self._words(name, inputs)
        for name, output in _SPECIAL.items():
            default = self._tokenizer.eos_ids[0] if self._tokenizer.eos_ids else -1
            value = (
                contract.read(Tensor(name, "INT32", ""), inputs[name])
                if name in inputs
                else default
            )
            found[output] = np.array([[value]], np.int32)
        return found

    def _words(self, name: str, inputs: Mapping[str, Array]) -> Array:
        """Token ids of all words in row 0, the end of each in row 1, followed by -1: [1, 2, N]."""
        words: list[str] = (
            contract.read(Tensor(name, "STRING", "", dims=-1), inputs[name])
            if name in inputs
            else []
        )
        encoded = [self._tokenizer.encode(word, False, name) for word in words if word]
        ids = [id_ for word in encoded for id_ in word]
        ends = list(accumulate(len(word) for word in encoded))
        ends += [-1] * (len(ids) - len(ends))
        return np.array([[ids, ends]], np.int32)

    def _biases(self, inputs: Mapping[str, Array]) -> Array:
        """The bias of each token, or none: [1, vocabulary] or [1, 0]."""
        biases = options.word_biases(_BIAS_WORDS, _BIAS_WEIGHTS, inputs, self._tokenizer)
        if not biases:
            return np.zeros((1, 0), np.float32)
        table = np.zeros((1, self._tokenizer.vocab_size), np.float32)
        table[0, list(biases)] = list(biases.values())
        return table
