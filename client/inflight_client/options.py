"""What may be asked for, and as which tensors it travels."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from inflight_client.errors import InvalidRequest
from inflight_client.tensors import shown


class Message(TypedDict):
    """One turn of a chat. role: `system`, `user` or `assistant`."""

    role: str
    content: str


class Options(TypedDict, total=False):
    """Options of a generation; what is left out is the server's choice.

    The ranges are the server's to check; its error names the option.

    logit_bias is token id -> what is added to its logit. It travels as the two tensors
    `logit_bias_ids` and `logit_bias_values`. sampling_parameters and guided_decoding_guide travel
    as strings; what is given as a mapping, or a guide as a list, is written as JSON.
    """

    max_tokens: int
    min_tokens: int
    min_length: int
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
    logit_bias_ids: Sequence[int]
    logit_bias_values: Sequence[float]
    allowed_token_ids: Sequence[int]
    seed: int
    stop_words: Sequence[str]
    bad_words: Sequence[str]
    end_id: int
    ignore_eos: bool
    exclude_input_in_output: bool
    echo: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    sampling_parameters: str | Mapping[str, Any]
    cache_salt: str
    num_logprobs: int
    num_prompt_logprobs: int
    return_log_probs: bool
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: bool
    speculation: str
    guided_decoding_guide_type: str
    guided_decoding_guide: str | Mapping[str, Any] | Sequence[str]


# KServe's names of the datatypes. Where dims are [-1] there are lists in `Options`.
DATATYPES: dict[str, str] = {
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "min_length": "INT32",
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
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "sampling_parameters": "BYTES",
    "cache_salt": "BYTES",
    "num_logprobs": "INT32",
    "num_prompt_logprobs": "INT32",
    "return_log_probs": "BOOL",
    "n": "INT32",
    "best_of": "INT32",
    "beam_width": "INT32",
    "length_penalty": "FP32",
    "early_stopping": "BOOL",
    "speculative_config": "BYTES",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
}
_JSON: dict[str, tuple[type, ...]] = {
    "sampling_parameters": (Mapping,),
    "guided_decoding_guide": (Mapping, list, tuple),
}


def tensors_of(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, datatype, value or list of values) of each tensor that options travel as.

    Raises:
        InvalidRequest: there is no such option, or it cannot be told as tensors.
    """
    for name, value in options.items():
        if name == "logit_bias":
            yield from _biases(value, options)
        elif name not in DATATYPES:
            raise InvalidRequest(_no_option(name))
        elif isinstance(value, _JSON.get(name, ())):
            yield name, DATATYPES[name], as_json(name, value)
        else:
            yield name, DATATYPES[name], value


def num_outputs(options: Mapping[str, Any]) -> int:
    """The n that was asked for, as an option or in sampling_parameters; 1 where it is not a number:
    the server says so."""
    asked = options.get("n")
    try:
        if asked is None and (parameters := options.get("sampling_parameters")):
            parsed = json.loads(parameters) if isinstance(parameters, str) else parameters
            asked = parsed.get("n")
        return 1 if asked is None else int(asked)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1


def as_json(name: str, value: Any) -> str:
    """`value` as JSON.

    Raises:
        InvalidRequest: it cannot be written so.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{name}: {shown(value)} cannot be written as JSON ({error})"
        ) from None


def _biases(biases: Any, options: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    names = ("logit_bias_ids", "logit_bias_values")
    if not isinstance(biases, Mapping):
        raise InvalidRequest(
            f"logit_bias: {shown(biases)} is not a mapping of token ids to numbers"
        )
    if any(name in options for name in names):
        raise InvalidRequest(f"logit_bias cannot be combined with {' and '.join(names)}")
    for name, values in zip(names, (list(biases), list(biases.values())), strict=True):
        yield name, DATATYPES[name], values


def _no_option(name: str) -> str:
    if name == "stream":
        return "stream is not an option: stream() and chat_stream() stream, the others do not"
    allowed = list(Options.__annotations__)
    close = difflib.get_close_matches(name, allowed, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{name} is not an option{meant} allowed: {', '.join(allowed)}"
