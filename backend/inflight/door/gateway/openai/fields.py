"""The fields of OpenAI's requests, with vLLM's additions, and the tensors that they become."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import jiter
import msgspec
from msgspec import Meta, Raw

from inflight.door.gateway.problem import TOO_DEEP, Problem
from inflight.errors import did_you_mean

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OutputCount = Annotated[int, Meta(ge=1, le=64)]

_PLACE = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)


class StreamOptions(msgspec.Struct):
    """Attributes:
    include_usage: a last chunk has the usage of the request.
    continuous_usage_stats: each chunk has the usage up to it.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's: one of them."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Fields(msgspec.Struct, kw_only=True):
    """What both kinds of requests have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: OutputCount | None = None
    max_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    epsilon_cutoff: float | None = None
    xtc_threshold: float | None = None
    xtc_probability: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int32 | None = None
    dry_penalty_last_n: Int32 | None = None
    dry_sequence_breakers: list[str] | None = None
    no_repeat_ngram_size: Int32 | None = None
    min_tokens: Int32 | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int32] | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    speculation: str | None = None
    priority_class: str | None = None
    deadline_ms: Int32 | None = None
    cache_priority: Int32 | None = None
    cache_ttl_s: float | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def num_outputs(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def continues_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)


F = TypeVar("F", bound=msgspec.Struct)

# From a field to the tensor that takes its value as it is.
TENSORS = {
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma"),
            *("epsilon_cutoff", "xtc_threshold", "xtc_probability", "presence_penalty"),
            *("frequency_penalty", "repetition_penalty", "dry_multiplier", "dry_base"),
            *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            *("no_repeat_ngram_size", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
            *("allowed_token_ids", "cache_salt", "speculation", "n"),
            *("priority_class", "deadline_ms", "cache_priority", "cache_ttl_s"),
        )
    },
}
# Names that clients know for tensors that `TENSORS` lacks.
FIELDS_OF_TENSORS = {
    "text_input": "prompt",
    "prompt_token_ids": "prompt",
    "messages": "messages",
    "stop_words": "stop",
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
}

# Accepted without an effect on the output: hints and labels.
HINTS = frozenset(
    {
        *("user", "metadata", "prompt_cache_key"),
        *("safety_identifier", "verbosity", "prediction", "reasoning_effort", "request_id"),
    }
)
# Known, but not supported; accepted at values that ask for what happens anyway.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "store": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "moderation": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "truncate_prompt_tokens": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "priority": (None, 0),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "prompt_logprobs": (None,),
    "logits_processors": (None, []),
    "documents": (None, []),
    "chat_template": (None,),
    "mm_processor_kwargs": (None, {}),
    "prompt_embeds": (None,),
    "prompt": (None,),  # of a chat
    "messages": (None,),  # of a completion
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "lora_request": (None,),
}
_INSTEAD = {
    **{name: "structured_outputs" for name in UNSUPPORTED if name.startswith("guided_")},
    "functions": "tools",
    "function_call": "tool_choice",
    "priority": "priority_class",
}
# OpenAI's service tier that is cheaper because it may wait.
FLEX = "flex"
# The cache_priority of prompts that clients ask to cache in the words of OpenAI or Anthropic: above
# the default, below what a server's own clients choose to pin.
CACHED_PRIORITY = 60
# By OpenAI's prompt_cache_retention, the cache_ttl_s; of other values, nothing changes.
_RETENTION_S = {"24h": 24 * 60 * 60.0}


def parse(
    body: bytes, kind: type[F], is_strict: bool, hints: Collection[str] = HINTS
) -> tuple[F, list[str]]:
    """A request, and the names of its fields that are not known.

    Args:
        is_strict: refuse unknown fields.
        hints: names of fields that are accepted without an effect.

    Raises:
        Problem: with the field at fault.
    """
    if not body:
        raise Problem("body: is empty; allowed: a JSON object")
    _check_json(body)
    try:
        given = msgspec.json.decode(body, type=dict[str, Raw])
        unknown = _check_names(given, kind, is_strict, hints)
        return msgspec.json.decode(body, type=kind), unknown
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except ValueError as error:  # msgspec's are, and that of integers with thousands of digits
        raise Problem(f"body: is not valid JSON ({error})") from None


def _check_json(body: bytes) -> None:
    """Refuse what parsers read differently: keys that occur twice, and invalid UTF-8 anywhere.
    Raises Problem."""
    try:
        jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        what = str(error)
        if "recursion" in what:
            raise Problem(TOO_DEEP) from None
        raise Problem(f"body: is not valid JSON ({what[:200]})") from None


def _check_names(
    given: Mapping[str, Raw], kind: type[F], is_strict: bool, hints: Collection[str]
) -> list[str]:
    unknown = []
    for name, raw in given.items():
        if name in kind.__struct_fields__ or name in hints:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif msgspec.json.decode(raw) not in UNSUPPORTED[name]:
            instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else "omit it"
            raise Problem(f"{name}: is not supported; {instead}", param=name)
    if unknown and is_strict:
        name = unknown[0] if unknown[0].isprintable() else "..."
        hint = did_you_mean(name, kind.__struct_fields__) or "; omit it"
        raise Problem(f"{name[:64]}: is unknown{hint}", param=name[:64])
    return unknown


def _invalid(error: msgspec.ValidationError) -> Problem:
    match = _PLACE.match(str(error))
    assert match is not None
    what, place = match.groups()
    if place is None and (missing := re.search(r"required field `(\w+)`", what)):
        return Problem(f"{missing[1]}: is missing", param=missing[1])
    what = what[:1].lower() + what[1:]
    return Problem(f"{place or 'body'}: {what}", param=place or None)


def tensors_of(fields: Fields, max_tokens: int | None) -> dict[str, Any]:
    """The tensors of the fields that both kinds of requests have, without the prompt.

    Args:
        max_tokens: -1 for as many as the context allows.

    Raises:
        Problem: with the field at fault.
    """
    if fields.stream_options is not None and not fields.stream:
        raise Problem("stream_options: allowed only with stream true", param="stream_options")
    tensors = {
        tensor: value
        for name, tensor in TENSORS.items()
        if (value := getattr(fields, name)) is not None
    }
    # Models of Triton are greedy by default, OpenAI's API is not.
    tensors.setdefault("temperature", 1.0)
    if max_tokens is not None:
        tensors["max_tokens"] = max_tokens
    if fields.seed is not None:
        tensors["seed"] = _seed(fields.seed)
    if fields.stop is not None and (words := _stop_words(fields.stop)):
        tensors["stop_words"] = words
    for name in ("stop_token_ids", "bad_words", "dry_sequence_breakers"):
        if tensors.get(name) == []:
            del tensors[name]
    if fields.service_tier == FLEX:
        tensors.setdefault("priority_class", "batch")
    if fields.prompt_cache_retention in _RETENTION_S:
        tensors.setdefault("cache_priority", CACHED_PRIORITY)
        tensors.setdefault("cache_ttl_s", _RETENTION_S[fields.prompt_cache_retention])
    if fields.logit_bias:
        for name in fields.logit_bias:
            if not (name.isascii() and name.isdecimal() and len(name) < 10):
                raise Problem(
                    f"logit_bias: {name[:20]!r} is not a token id; allowed: token ids as keys",
                    param="logit_bias",
                )
        tensors["logit_bias_ids"] = [int(name) for name in fields.logit_bias]
        tensors["logit_bias_values"] = list(fields.logit_bias.values())
    if not fields.stream or fields.includes_usage:
        tensors["return_timing"] = True  # for the number of cached tokens
    return tensors | guide_of(fields)


def names_of(fields: Fields, logprobs: str) -> dict[str, str]:
    """The client's name of each tensor that has another one, for errors.

    Args:
        logprobs: the field of the number of the most probable tokens.
    """
    guide = "response_format" if fields.structured_outputs is None else "structured_outputs"
    guides = dict.fromkeys(("guided_decoding_guide", "guided_decoding_guide_type"), guide)
    return FIELDS_OF_TENSORS | guides | {"num_logprobs": logprobs}


def _stop_words(stop: str | list[str]) -> list[str]:
    words = [stop] if isinstance(stop, str) else stop
    if "" in words:  # Triton's models take one for none
        raise Problem("stop: has an empty string; allowed: one character or more", param="stop")
    return words


def _seed(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise Problem("seed: is out of range; allowed: 64 bits", param="seed")
    return seed % 2**64  # OpenAI's is signed


def guide_of(fields: Fields) -> dict[str, str]:
    """The tensors of the constraint on the output; empty without one. Raises Problem."""
    found = _response_format(fields.response_format)
    structured = fields.structured_outputs
    if structured is None:
        return found
    choice = structured.choice
    guides = {
        "json_schema": None if structured.json is None else _text(structured.json),
        "regex": structured.regex,
        "choice": None if choice is None else msgspec.json.encode(choice).decode(),
        "ebnf_grammar": structured.grammar,
        "json": "" if structured.json_object else None,
    }
    given = {kind: guide for kind, guide in guides.items() if guide is not None}
    if len(given) != 1 or found:
        raise Problem(
            "structured_outputs: allowed: one of json, regex, choice, grammar and json_object, and "
            "no response_format",
            param="structured_outputs",
        )
    ((kind, guide),) = given.items()
    return _guide(kind, guide)


def _response_format(given: ResponseFormat | None) -> dict[str, str]:
    if given is None or given.type == "text":
        return {}
    if given.type == "json_object":
        return _guide("json", "")
    if given.type != "json_schema":
        raise Problem(
            f"response_format.type: {given.type[:40]!r} is not supported; allowed: text, "
            "json_object and json_schema",
            param="response_format.type",
        )
    if given.json_schema is None or given.json_schema.schema is None:
        where = "response_format.json_schema"
        raise Problem(
            f"{where}: has no schema; allowed: an object with name and schema", param=where
        )
    return _guide("json_schema", _text(given.json_schema.schema))


def _guide(kind: str, guide: str) -> dict[str, str]:
    tensors = {"guided_decoding_guide_type": kind}
    return tensors | ({"guided_decoding_guide": guide} if guide else {})


def _text(schema: dict[str, Any] | str | bool) -> str:
    """JSON; vLLM's clients may send it as a string."""
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
