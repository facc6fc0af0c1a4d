"""What may be asked for, and as which tensors it travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class Message(TypedDict):
    """One turn of a chat. role: `system`, `user` or `assistant`."""

    role: str
    content: str


class Options(TypedDict, total=False):
    """Options of a generation; what is left out is the server's choice.

    The ranges are the server's to check; its error names the option.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_words: Sequence[str]
    bad_words: Sequence[str]
    end_id: int
    ignore_eos: bool
    exclude_input_in_output: bool
    sampling_parameters: str
    cache_salt: str


# KServe's names of the datatypes. Those of BYTES are lists in `Options` where dims are [-1].
DATATYPES: dict[str, str] = {
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "end_id": "INT32",
    "ignore_eos": "BOOL",
    "exclude_input_in_output": "BOOL",
    "sampling_parameters": "BYTES",
    "cache_salt": "BYTES",
    "stream": "BOOL",
    "text_input": "BYTES",
    "messages": "BYTES",
}
