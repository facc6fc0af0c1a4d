"""The model `postprocessing` of TensorRT-LLM's backend: token ids to text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from inflight.errors import RequestError
from inflight.text.detokenize import Detokenizer
from inflight.triton import contract
from inflight.triton.contract import Array, Tensor
from inflight.triton.tensorrtllm.text_front import TextFront

_TOKENS = "TOKENS_BATCH"
_LENGTHS = Tensor("SEQUENCE_LENGTH", "INT32", "Tokens of each row.", dims=-1, required=True)


class PostprocessingFront(TextFront):
    """A model with the role `postprocessing`. It decodes each request by itself, so a character
    whose tokens are in two requests is lost: `ensemble` does not use it."""

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        super().__init__(directory, parameters)
        self._detokenizer = Detokenizer(self._tokenizer)

    def convert(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        lengths: list[int] = contract.read_required(_LENGTHS, inputs)
        rows = inputs.get(_TOKENS)
        if rows is None:
            raise RequestError("is missing", _TOKENS)
        if rows.ndim != 2 or rows.dtype != np.int32 or len(rows) != len(lengths):
            raise RequestError(
                f"has shape {[1, *rows.shape]}, dtype {rows.dtype}; allowed: [1, "
                f"{len(lengths)}, N], INT32, as {_LENGTHS.name} has {len(lengths)} values",
                _TOKENS,
            )
        if min(lengths) < 0 or max(lengths) > rows.shape[1]:
            raise RequestError(f"allowed: 0 to {rows.shape[1]} each", _LENGTHS.name)
        texts = [
            self._detokenizer.decode(row[:length])
            for row, length in zip(rows.tolist(), lengths, strict=True)
        ]
        return {"OUTPUT": np.array([text.encode() for text in texts], object)}
