"""What may be asked for, and as which tensors it travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class Message(TypedDict):
    """One turn of a chat. role: `system`, `user` or `assistant`."""

    role: str
    content: str


class Options(TypedDict, total=False):
    """Options of a generation; what is left out is the server's choice.

    The ranges are the server's to check; its error names the option.

    logit_bias is token id -> what is added to its logit. It travels as the two tensors
    `logit_bias_ids` and `logit_bias_values`.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_threshold: float
    xtc_probability: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    seed: int
    stop_words: Sequence[str]
    bad_words: Sequence[str]
    end_id: int
    ignore_eos: bool
    exclude_input_in_output: bool
    echo: bool
    sampling_parameters: str
    cache_salt: str
    num_logprobs: int
    num_prompt_logprobs: int
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: bool
    speculation: str
    guided_decoding_guide_type: str
    guided_decoding_guide: str


# KServe's names of the datatypes. Where dims are [-1] there are lists in `Options`.
DATATYPES: dict[str, str] = {
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "typical_p": "FP32",
    "top_n_sigma": "FP32",
    "xtc_threshold": "FP32",
    "xtc_probability": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "dry_multiplier": "FP32",
    "dry_base": "FP32",
    "dry_allowed_length": "INT32",
    "dry_penalty_last_n": "INT32",
    "dry_sequence_breakers": "BYTES",
    "no_repeat_ngram_size": "INT32",
    "logit_bias_ids": "INT32",
    "logit_bias_values": "FP32",
    "allowed_token_ids": "INT32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "end_id": "INT32",
    "ignore_eos": "BOOL",
    "exclude_input_in_output": "BOOL",
    "echo": "BOOL",
    "sampling_parameters": "BYTES",
    "cache_salt": "BYTES",
    "num_logprobs": "INT32",
    "num_prompt_logprobs": "INT32",
    "n": "INT32",
    "best_of": "INT32",
    "beam_width": "INT32",
    "length_penalty": "FP32",
    "early_stopping": "BOOL",
    "speculation": "BYTES",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
    "stream": "BOOL",
    "text_input": "BYTES",
    "messages": "BYTES",
}
