"""The layout of tensorrtllm_backend (inflight_batcher_llm): `ensemble` or `tensorrt_llm_bls`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from inflight_client import tensors
from inflight_client.completion import Delta
from inflight_client.errors import InvalidRequest, ServerError
from inflight_client.layouts.layout import Generation, Prompt, Target, refuse_token_ids, refused
from inflight_client.option_table import DATATYPES
from inflight_client.options import as_json, num_outputs
from inflight_client.reader import Reader

# Options with another name there.
_RENAMED = {"n": "num_return_sequences", "min_length": "min_tokens"}
_OPTIONS = frozenset(
    {
        *("max_tokens", "min_tokens", "min_length", "temperature", "top_k", "top_p", "seed"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_words"),
        *("bad_words", "end_id", "beam_width", "length_penalty", "n"),
        *("guided_decoding_guide_type", "guided_decoding_guide"),
    }
)
# Sent whether they are set or not, or without a meaning there.
_ALWAYS = frozenset({"return_num_input_tokens", "return_num_output_tokens", "return_finish_reason"})


class TensorRtLlm:
    name = "tensorrtllm"
    models: tuple[str, ...] = ("ensemble", "tensorrt_llm_bls")

    def generate(
        self, target: Target, prompt: Prompt, stream: bool, options: Mapping[str, Any]
    ) -> Generation:
        refuse_token_ids(prompt, self.name)
        if "max_tokens" not in options:
            raise InvalidRequest(f"max_tokens: is missing; the layout {self.name} requires it")
        request = tensors.infer_request(target.model, target.version)

        def add(name: str, datatype: str, value: Any) -> None:
            tensors.add_input(request, name, datatype, value, is_batched=True)

        add("text_input", "BYTES", prompt)
        add("stream", "BOOL", stream)
        add("exclude_input_in_output", "BOOL", _excludes_input(options))
        add("return_num_input_tokens", "BOOL", True)
        add("return_num_output_tokens", "BOOL", True)
        for name, value in options.items():
            if name in _ALWAYS or name in ("echo", "exclude_input_in_output"):
                continue
            if name not in _OPTIONS:
                raise refused(name, self.name)
            if name == "guided_decoding_guide" and not isinstance(value, str):
                value = as_json(name, value)
            add(_RENAMED.get(name, name), DATATYPES[name], value)
        max_tokens = options["max_tokens"]
        return Generation(request, functools.partial(_Reader, num_outputs(options), max_tokens))


def _excludes_input(options: Mapping[str, Any]) -> Any:
    if "exclude_input_in_output" in options:
        return options["exclude_input_in_output"]
    return not options.get("echo", False)


class _Reader(Reader):
    """This layout reports no finish reasons: the end of the stream is that of all outputs, and an
    output with max_tokens tokens is taken as cut.

    Args:
        num_outputs: number of outputs requested.
        max_tokens: of each; not above 0 if there is no limit.
    """

    def __init__(self, num_outputs: int, max_tokens: int) -> None:
        super().__init__(num_outputs)
        self._max_tokens = max_tokens
        self._num_input_tokens = 0
        self._num_output_tokens: dict[int, int] = {}
        self._finished: set[int] = set()

    def _deltas(self, values: dict[str, list[Any]]) -> list[Delta]:
        texts = values.get("text_output", [])
        (self._num_input_tokens, *_) = values.get("num_input_tokens", [self._num_input_tokens])
        counts = values.get("num_output_tokens", [])
        indexes = values.get("sequence_index", [])
        reasons = values.get("finish_reason", [])
        deltas = []
        for place, text in enumerate(texts):
            index = indexes[place] if len(indexes) == len(texts) else place
            count = counts[place] if len(counts) == len(texts) else 0
            reason = (reasons[place] if len(reasons) == len(texts) else "") or None
            self._num_output_tokens[index] = self._num_output_tokens.get(index, 0) + count
            if reason is not None:
                self._finished.add(index)
            deltas.append(Delta(text, reason, self._num_input_tokens, count, index=index))
        return deltas

    def end(self) -> list[Delta]:
        if len(self._num_output_tokens) < self._num_outputs:
            raise ServerError("the stream ended before its last response")
        return [
            Delta(
                "",
                "length" if 0 < self._max_tokens <= count else "stop",
                self._num_input_tokens,
                0,
                index=index,
            )
            for index, count in sorted(self._num_output_tokens.items())
            if index not in self._finished
        ]
