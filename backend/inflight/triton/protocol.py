"""Between tensors and requests: what a client's inputs mean, and what an answer's outputs are.

Pure functions: no Triton, no engine, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from inflight.errors import RequestError, did_you_mean
from inflight.request import Request, TokenEvent
from inflight.sampling import SamplingParams
from inflight.triton import dialect, tensors
from inflight.triton.tensors import Array

MAX_SALT_LENGTH = 256

# Parameters that clients of other servers send and that change nothing here: switches of other
# backends, and headers that a proxy may have the server forward.
HARMLESS_PARAMETERS = frozenset(
    {"accumulate_tokens", "pad_id", "traceparent", "tracestate", "x-request-id"}
)

_OPTION_NAMES = tuple(tensor.name for tensor in tensors.OPTIONS)
_SAMPLING_TENSORS = frozenset(SamplingParams.__struct_fields__)
_PROMPT_TENSORS = (tensors.TEXT_INPUT.name, tensors.MESSAGES.name)
_UNSUPPORTED = (
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "priority_class",
    "deadline_ms",
)


class Limits(msgspec.Struct, frozen=True):
    """What an engine can take: see wire.Welcome."""

    vocab_size: int
    max_model_len: int


class Generation(msgspec.Struct, frozen=True):
    """A checked request, before it has an id.

    Attributes:
        prompt_ids: at least one.
        params: how to choose tokens.
        cache_salt: see Request.
        stream: answer as tokens come.
        echo: the prompt leads the output.
        detokenized: a detokenizer follows and reports what it delivered.
    """

    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str
    stream: bool
    echo: bool
    detokenized: bool

    def request(self, request_id: int) -> Request:
        # Without a stream the detokenizer sees one response, at the end: no sign of life before.
        return Request(
            request_id,
            self.prompt_ids,
            self.params,
            cache_salt=self.cache_salt,
            acknowledged=self.detokenized and self.stream,
        )


def parse(inputs: Mapping[str, Array], parameters: Mapping[str, Any], limits: Limits) -> Generation:
    """What a request to the model `llm` asks for.

    Args:
        inputs: its tensors by name; not kept.
        parameters: Triton's request parameters, to which HTTP adds keys that no input has.
        limits: of the engine.

    Raises:
        RequestError: something is not allowed; the client's name of it leads the message.
    """
    _check_parameters(parameters)
    values = tensors.read_request(inputs)
    prompt_tensor = values.pop("prompt_tensor", None)
    if prompt_tensor not in (None, *_PROMPT_TENSORS):
        raise RequestError(f"allowed: {' or '.join(_PROMPT_TENSORS)}", "prompt_tensor")
    prompt_ids = _prompt(values.pop("input_ids", None), prompt_tensor or "input_ids", limits)
    values, names = _merge_dialect(values)
    _refuse_unsupported(values, names)
    if (end_id := values.get("end_id")) is not None and end_id >= limits.vocab_size:
        raise RequestError(
            f"{end_id} is not in the vocabulary; allowed: 0 to {limits.vocab_size - 1}",
            names["end_id"],
        )
    return Generation(
        prompt_ids=prompt_ids,
        params=_sampling(values, names),
        cache_salt=_salt(values.get("cache_salt", "")),
        stream=values.get("stream", False),
        echo=not values.get("exclude_input_in_output", True),
        detokenized=prompt_tensor is not None,
    )


def merge(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """Two events of one request as one."""
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        window=earlier.window,
        num_cached_tokens=earlier.num_cached_tokens,
    )


def outputs(event: TokenEvent, num_input_tokens: int, echo: list[int]) -> dict[str, Array]:
    """The tensors of one response of the model `llm`.

    Args:
        event: what is new.
        num_input_tokens: tokens of the prompt.
        echo: ids to put in front of the event's: the prompt's, in a first response that wants it.
    """
    new = echo + event.token_ids
    # Echoed, the prompt is part of the text, so that nothing stands before it.
    window = [] if echo else event.window
    state = [len(window), event.trim, int(event.is_last), event.request_id, event.position]
    return {
        "output_ids": np.array(new, np.int32),
        "detokenize_ids": np.array(window + new, np.int32),
        "detokenize_state": np.array(state, np.int64),
        "finish_reason": _strings(str(event.finish_reason or "")),
        "num_input_tokens": np.array([num_input_tokens], np.uint32),
        "num_output_tokens": np.array([len(event.token_ids)], np.uint32),
        "cumulative_logprob": np.array([event.cumulative_logprob], np.float32),
        "logprobs": _strings(""),
    }


def _strings(*texts: str) -> Array:
    return np.array([text.encode() for text in texts], object)


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    for name in parameters:
        if name in HARMLESS_PARAMETERS or name.startswith("triton_"):
            continue
        if name in _OPTION_NAMES:
            raise RequestError("is an input tensor, not a request parameter", name)
        raise RequestError(
            f"is neither an input nor a parameter{did_you_mean(name, _OPTION_NAMES)}", name
        )


def _prompt(ids: list[int] | None, name: str, limits: Limits) -> list[int]:
    if ids is None:
        raise RequestError("is missing", name)
    if not ids:
        raise RequestError("the prompt has no tokens; allowed: at least 1", name)
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        raise RequestError(
            f"{low if low < 0 else high} is not in the vocabulary; "
            f"allowed: 0 to {limits.vocab_size - 1}",
            name,
        )
    if len(ids) >= limits.max_model_len:
        # Gateways look for this wording to fall back to a model with a longer context.
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, "
            f"your prompt has {len(ids)}; allowed: {limits.max_model_len - 1} and one to generate",
            name,
        )
    return ids


def _merge_dialect(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values under our names, and how the client called each of them."""
    values = dict(values)
    names = {name: name for name in _OPTION_NAMES}
    if "min_length" in values:
        if "min_tokens" in values:
            raise RequestError("is another name of min_tokens; send one of them", "min_length")
        values["min_tokens"] = values.pop("min_length")
        names["min_tokens"] = "min_length"
    if (text := values.pop(dialect.PARAM, None)) is not None:
        for name, value in dialect.parse(text).items():
            if name in values:
                raise RequestError(
                    f"{name} stands in the tensor {names[name]} too; send one of them",
                    dialect.PARAM,
                )
            values[name] = value
            names[name] = f"{dialect.PARAM}: {name}"
    return values, names


def _refuse_unsupported(values: dict[str, Any], names: dict[str, str]) -> None:
    if (n := values.get("n", 1)) != 1:
        raise RequestError(f"{n} outputs are not supported; allowed: 1", names["n"])
    if num := values.get("num_logprobs", 0):
        raise RequestError(f"{num} is not supported; allowed: 0", "num_logprobs")
    for name in _UNSUPPORTED:
        if name in values:
            raise RequestError("is not supported in this version; leave it out", name)


def _sampling(values: dict[str, Any], names: dict[str, str]) -> SamplingParams:
    chosen = {name: value for name, value in values.items() if name in _SAMPLING_TENSORS}
    for name in ("stop_words", "bad_words"):
        if name in chosen:
            # A lone empty string is how some gateways write "none".
            words = [] if chosen[name] == [""] else chosen[name]
            chosen[name] = tuple(words)
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        renamed = names.get(error.param or "")
        raise RequestError(str(error).removeprefix(f"{error.param}: "), renamed) from None


def _salt(salt: str) -> str:
    if len(salt) > MAX_SALT_LENGTH or not salt.isprintable():
        raise RequestError(
            f"allowed: up to {MAX_SALT_LENGTH} characters, all printable", "cache_salt"
        )
    return salt


def request_parameters(text: str) -> dict[str, Any]:
    """Triton's request parameters, which its Python API gives as JSON."""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
