"""Options whose values are not tensors: JSON, or Triton's request parameters.

The keys are those of vLLM's SamplingParams. As gateways and benchmark tools send them, numbers may
be strings, null means the default, and options that are not supported are accepted at their neutral
value.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from inflight.errors import RequestError, did_you_mean
from inflight.sampling.options import OptionField
from inflight.text.tokenizer import check_unicode
from inflight.triton.dialects import guides
from inflight.triton.dialects.json_values import Unreadable, shown
from inflight.triton.request_options import OPTIONS

Key = tuple[str, Callable[[str, Any], Any]]
"""Our name of an option, and the reader of its value, given the key and the value. It returns None
for a value without effect, and raises Unreadable."""


def read(
    values: Mapping[str, Any], where: str, keys: Mapping[str, Key] | None = None
) -> dict[str, Any]:
    """Options under the names of our tensors.

    Args:
        values: by key, as JSON has them.
        where: the client's name of what holds them, for errors.
        keys: those that are known; KEYS by default.

    Raises:
        RequestError: an unknown key, or a value that is not allowed.
    """
    known = KEYS if keys is None else keys
    options: dict[str, Any] = {}
    try:
        for key, value in values.items():
            options |= _option(key, value, known)
        _join_top_logprobs(options)
        if options.pop("use_beam_search", False):
            _beam_search_options(options)
    except Unreadable as error:
        raise RequestError(str(error), where) from None
    return options


def _option(key: str, value: Any, keys: Mapping[str, Key]) -> dict[str, Any]:
    """What a key sets: nothing, an option, or several."""
    if key in IGNORED:
        if value not in IGNORED[key]:
            allowed = ", ".join(json.dumps(choice) for choice in IGNORED[key])
            raise Unreadable(
                f"{key} is {shown(value)}, which is not supported in this version; "
                f"allowed: {allowed}"
            )
        return {}
    if key in guides.KEYS:
        return guides.read(key, value)
    if key not in keys:
        near = did_you_mean(key, [*keys, *IGNORED, *guides.KEYS])
        raise Unreadable(f"{key[:64]!r} is not a key{near}")
    name, convert = keys[key]
    option = None if value is None else convert(key, value)
    return {} if option is None else {name: option}


def _join_top_logprobs(options: dict[str, Any]) -> None:
    top = options.pop("top_logprobs", 0)
    if top:
        if "num_logprobs" not in options:
            raise Unreadable("top_logprobs needs logprobs: true; allowed: both or none")
        options["num_logprobs"] = max(top, options["num_logprobs"])


def _beam_search_options(options: dict[str, Any]) -> None:
    """vLLM's use_beam_search: best_of beams, or n of them, and a temperature of 0."""
    width = options.pop("best_of", None) or options.get("n", 1)
    if width < 2:
        raise Unreadable("use_beam_search needs best_of or n above 1, which are its beams")
    if options.setdefault("beam_width", width) != width:
        raise Unreadable(
            f"use_beam_search has {width} beams, and beam_width is {options['beam_width']}; "
            "send one of them"
        )


def _integer(key: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Unreadable(f"{key} is {shown(value)}; allowed: an integer")


def _number(key: str, value: Any) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise Unreadable(f"{key} is {shown(value)}; allowed: a number")


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise Unreadable(f"{key} is {shown(value)}; allowed: true, false")


def _strings(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise Unreadable(f"{key} is {shown(value)}; allowed: a string or a list of them")
    for one in values:
        _check_unicode(key, one)
    return values


def _logprobs(key: str, value: Any) -> int | None:
    """OpenAI's chat flag, or a number as everywhere else."""
    if isinstance(value, bool):
        return 0 if value else None
    return _integer(key, value)


def _seed(key: str, value: Any) -> int | None:
    """vLLM's -1 is no seed. Others may be negative, too: OpenAI's are signed."""
    seed = _integer(key, value)
    if seed == -1:
        return None
    return seed % 2**64 if -(2**63) <= seed < 0 else seed


def _parsed(value: Any) -> Any:
    """A list or an object may be JSON text: a request parameter has no other way to hold one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _ids(key: str, value: Any) -> list[int]:
    value = _parsed(value)
    if not isinstance(value, list):
        raise Unreadable(f"{key} is {shown(value)}; allowed: a list of token ids")
    return [_integer(key, one) for one in value]


def _biases(key: str, value: Any) -> list[tuple[int, float]]:
    value = _parsed(value)
    if not isinstance(value, dict):
        raise Unreadable(f"{key} is {shown(value)}; allowed: an object of token ids and numbers")
    return [(_integer(key, one), _number(key, bias)) for one, bias in value.items()]


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"{key} is {shown(value)}; allowed: a string")
    _check_unicode(key, value)
    return value


def _check_unicode(key: str, text: str) -> None:
    """JSON can spell what UTF-8 cannot."""
    try:
        check_unicode(text, key)
    except RequestError as error:
        raise Unreadable(str(error)) from None


# By type of the option, and whether it is a list.
_READERS: dict[tuple[type, bool], Callable[[str, Any], Any]] = {
    (int, False): _integer,
    (float, False): _number,
    (bool, False): _flag,
    (str, False): _text,
    (str, True): _strings,
    (int, True): _ids,
    (tuple, True): _biases,
}
# Keys whose vLLM values have another type than the option.
_READERS_BY_KEY: dict[str, Callable[[str, Any], Any]] = {
    "logprobs": _logprobs,
    "seed": _seed,
}


def reader_of(field: OptionField) -> Callable[[str, Any], Any]:
    """Of an option's values under its own name."""
    return _READERS[field.kind, field.is_list]


KEYS: dict[str, Key] = {
    key: (field.name, _READERS_BY_KEY.get(key) or reader_of(field))
    for field in OPTIONS
    for key in field.vllm_keys
} | {
    # Not options by themselves: `read` turns them into others.
    "top_logprobs": ("top_logprobs", _integer),
    "use_beam_search": ("use_beam_search", _flag),
}
"""vLLM's keys, and where vLLM has none llama.cpp's or our own."""

IGNORED: dict[str, tuple[Any, ...]] = {
    "detokenize": (True, None),
    "spaces_between_special_tokens": (True, None),
    "include_stop_str_in_output": (False, None),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None, []),
    "lora_name": (None, ""),
    # How vLLM's engine hands results to its own server.
    "output_kind": (0, 1, 2, None),
    "flat_logprobs": (False, None),
    "skip_clone": (False, True, None),
    "skip_reading_prefix_cache": (False, None),
    "extra_args": (None, {}),
}
"""Keys that are accepted at their neutral values only."""
