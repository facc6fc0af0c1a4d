"""The tensor `sampling_parameters`: options as a JSON object, under vLLM's names.

Benchmark tools and gateways for vLLM's backend send it, so numbers may be strings, null means the
default, and unsupported options are accepted at their neutral value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from inflight.errors import RequestError, did_you_mean
from inflight.text.tokenizer import check_unicode
from inflight.triton.request_options import OPTIONS

PARAM = "sampling_parameters"
MAX_BYTES = 1 << 16


def parse(text: str) -> dict[str, Any]:
    """Options of a JSON object, under the names of our tensors.

    Raises:
        RequestError: not JSON, an unknown key, or a value of the wrong type.
    """
    if len(text) > MAX_BYTES:
        raise RequestError(f"{len(text)} characters are too many; allowed: {MAX_BYTES}", PARAM)
    options: dict[str, Any] = {}
    for key, value in _object(text).items():
        if key in IGNORED:
            if value not in IGNORED[key]:
                allowed = ", ".join(json.dumps(choice) for choice in IGNORED[key])
                raise RequestError(
                    f"{key} is {_shown(value)}, which is not supported in this version; "
                    f"allowed: {allowed}",
                    PARAM,
                )
        elif key in _KEYS:
            name, convert = _KEYS[key]
            if value is not None:
                options[name] = convert(key, value)
                if options[name] is None:  # a neutral value
                    del options[name]
        else:
            raise RequestError(
                f"{key[:64]!r} is not a key{did_you_mean(key, [*_KEYS, *IGNORED])}", PARAM
            )
    top = options.pop("top_logprobs", 0)
    if top:
        if "num_logprobs" not in options:
            raise RequestError("top_logprobs needs logprobs: true; allowed: both or none", PARAM)
        options["num_logprobs"] = max(top, options["num_logprobs"])
    if options.pop("use_beam_search", False):
        _beam_search_options(options)
    return options


def _beam_search_options(options: dict[str, Any]) -> None:
    """vLLM's use_beam_search: best_of beams, or n of them, and a temperature of 0."""
    width = options.pop("best_of", None) or options.get("n", 1)
    if width < 2:
        raise RequestError("use_beam_search needs best_of or n above 1, which are its beams", PARAM)
    if options.setdefault("beam_width", width) != width:
        raise RequestError(
            f"use_beam_search has {width} beams, and beam_width is {options['beam_width']}; "
            "send one of them",
            PARAM,
        )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise RequestError("is nested too deeply", PARAM) from None
    except json.JSONDecodeError as error:
        raise RequestError(f"is not valid JSON ({error.msg} at {error.pos})", PARAM) from None
    except ValueError:  # an integer of thousands of digits
        raise RequestError("holds a number that is too long", PARAM) from None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, not {_shown(value)}", PARAM)
    return value


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is not a number in JSON", PARAM)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RequestError("a key occurs twice", PARAM)
    return found


def _integer(key: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise RequestError(f"{key} is {_shown(value)}; allowed: an integer", PARAM)


def _number(key: str, value: Any) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise RequestError(f"{key} is {_shown(value)}; allowed: a number", PARAM)


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise RequestError(f"{key} is {_shown(value)}; allowed: true, false", PARAM)


def _strings(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise RequestError(f"{key} is {_shown(value)}; allowed: a string or a list of them", PARAM)
    for one in values:
        # JSON can spell what UTF-8 cannot.
        check_unicode(one, PARAM)
    return values


def _logprobs(key: str, value: Any) -> int | None:
    """OpenAI's chat flag, or a number as everywhere else."""
    if isinstance(value, bool):
        return 0 if value else None
    return _integer(key, value)


def _ids(key: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise RequestError(f"{key} is {_shown(value)}; allowed: a list of token ids", PARAM)
    return [_integer(key, one) for one in value]


def _biases(key: str, value: Any) -> list[tuple[int, float]]:
    if not isinstance(value, dict):
        raise RequestError(
            f"{key} is {_shown(value)}; allowed: an object of token ids and numbers", PARAM
        )
    return [(_integer(key, one), _number(key, bias)) for one, bias in value.items()]


def _one_id(key: str, value: Any) -> int | None:
    if value == []:
        return None
    if not isinstance(value, list) or len(value) != 1:
        raise RequestError(f"{key} is {_shown(value)}; allowed: a list of one token id", PARAM)
    return _integer(key, value[0])


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# By type of the option, and whether it is a list.
_READERS: dict[tuple[type, bool], Callable[[str, Any], Any]] = {
    (int, False): _integer,
    (float, False): _number,
    (bool, False): _flag,
    (str, True): _strings,
    (int, True): _ids,
    (tuple, True): _biases,
}
# Keys whose vLLM values have another type than the option.
_READERS_BY_KEY: dict[str, Callable[[str, Any], Any]] = {
    "stop_token_ids": _one_id,
    "logprobs": _logprobs,
}

# vLLM's key, or where vLLM has none llama.cpp's or our own -> our name, and the reader of its
# value, which returns None for a value without effect.
_KEYS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    key: (field.name, _READERS_BY_KEY.get(key) or _READERS[field.kind, field.is_list])
    for field in OPTIONS
    for key in field.vllm_keys
} | {
    # Not options by themselves: `parse` turns them into others.
    "top_logprobs": ("top_logprobs", _integer),
    "use_beam_search": ("use_beam_search", _flag),
}

# Accepted only at these neutral values.
IGNORED: dict[str, tuple[Any, ...]] = {
    "detokenize": (True, None),
    "skip_special_tokens": (True, None),
    "spaces_between_special_tokens": (True, None),
    "include_stop_str_in_output": (False, None),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None, []),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
}
