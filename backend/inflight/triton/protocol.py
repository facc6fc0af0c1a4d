"""Between tensors and requests: parses a client's inputs, builds a response's outputs.

Pure functions: no Triton, no engine, no clock.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from inflight.config import MAX_DRAFTS
from inflight.core.output_constraint import StructuredOutput
from inflight.core.output_constraint import parse as parse_guide
from inflight.core.request import (
    AUTO_DRAFTS,
    DEFAULT_CACHE_PRIORITY,
    Candidate,
    FinishReason,
    PriorityClass,
    Request,
    TokenEvent,
    check_length,
)
from inflight.errors import KINDS, InflightError, RequestError, from_kind
from inflight.sampling.params import MAX_TOKENS_LIMIT, SAMPLING_OPTIONS, SamplingParams
from inflight.text.detokenize import mark_kept
from inflight.triton import contract
from inflight.triton.contract import Array
from inflight.triton.dialects import request_parameters, sampling_parameters
from inflight.triton.request_options import (
    MAX_SALT_LENGTH,
    OPTIONS,
    REQUEST_OPTIONS,
    RequestOptions,
)

# Of an error that a later step responds with. JSON may encode each character as six.
MAX_ERROR_CHARACTERS = 2048
_MAX_STEP_ERROR_CHARACTERS = 8 * MAX_ERROR_CHARACTERS
# Of the tensors with such an error.
_WRITTEN_BY = {
    contract.PROMPT_ERROR.name: "the tokenizers",
    contract.DETOKENIZE_ERROR.name: "the model llm",
}

_OPTION_NAMES = tuple(tensor.name for tensor in contract.OPTIONS)
_PROMPT_TENSORS = tuple(
    tensor.name for tensor in (contract.TEXT_INPUT, contract.PROMPT_TOKEN_IDS, contract.MESSAGES)
)


class Limits(msgspec.Struct, frozen=True):
    """An engine's limits: see frames.Welcome."""

    vocab_size: int
    max_model_len: int
    special_tokens: Mapping[str, int] = {}


class OutputDelta(NamedTuple):
    """One output's part of a response.

    Attributes:
        output: its index.
        event: its event.
        echo: the prompt's ids, to put first, in a first response with echo.
    """

    output: int
    event: TokenEvent
    echo: list[int]


class StepError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error of one step of an ensemble, which the next one responds with.

    Attributes:
        kind: of errors.KINDS.
        message: for the client; names the invalid tensor.
    """

    kind: str
    message: str


class Generation(msgspec.Struct, frozen=True):
    """A checked request, before it has an id.

    Attributes:
        prompt_ids: at least one.
        params: sampling and stop conditions.
        cache_salt: see Request.
        stream: respond as tokens arrive.
        echo: the prompt precedes the output.
        detokenized: a detokenizer follows and acknowledges deliveries.
        n: outputs to return.
        best_of: outputs to generate; the n with the highest mean logprob are returned. n for a beam
            search, which generates its outputs together.
        speculation, structured, return_timing, tenant, priority_class, deadline_ms, cache_priority,
            cache_ttl_s: see Request.
        kept: special tokens that stay in the text.
    """

    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str
    stream: bool
    echo: bool
    detokenized: bool
    n: int = 1
    best_of: int = 1
    speculation: int | None = None
    structured: StructuredOutput | None = None
    return_timing: bool = False
    kept: frozenset[int] = frozenset()
    tenant: str = ""
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    deadline_ms: int | None = None
    cache_priority: int = DEFAULT_CACHE_PRIORITY
    cache_ttl_s: float | None = None

    def requests(self, request_ids: list[int]) -> list[Request]:
        """The engine's requests, one for each of `best_of` outputs.

        With a seed, output i has seed + i. All but the first wait until the first has computed the
        prompt, and only the first reports prompt logprobs. A beam search is one request.
        """
        # Without a stream the detokenizer acknowledges only at the end.
        acknowledged = self.detokenized and self.stream
        first = Request(
            request_ids[0],
            self.prompt_ids,
            self.params,
            cache_salt=self.cache_salt,
            acknowledged=acknowledged,
            speculation=self.speculation,
            structured=self.structured,
            return_timing=self.return_timing,
            tenant=self.tenant,
            priority_class=self.priority_class,
            deadline_ms=self.deadline_ms,
            cache_priority=self.cache_priority,
            cache_ttl_s=self.cache_ttl_s,
        )
        if self.params.beam_width > 1:
            return [
                msgspec.structs.replace(first, acknowledged=False, output_ids=tuple(request_ids))
            ]
        made = [first]
        for index, request_id in enumerate(request_ids[1:], 1):
            seed = None if self.params.seed is None else (self.params.seed + index) % 2**64
            params = msgspec.structs.replace(self.params, seed=seed, num_prompt_logprobs=None)
            made.append(
                msgspec.structs.replace(
                    first, request_id=request_id, params=params, sibling=request_ids[0]
                )
            )
        return made

    def of_tenant(self, tenant: str) -> Generation:
        """The same on account of a tenant: sharing cached prefixes only with its requests, and its
        share of the tokens with all of them."""
        # A client's salt is printable, so it cannot contain the separator.
        salt = f"{tenant}\0{self.cache_salt}"
        return msgspec.structs.replace(self, cache_salt=salt, tenant=tenant)

    def answer(self, parts: list[OutputDelta]) -> list[OutputDelta]:
        """The parts to return, of finished outputs or of a stream."""
        if len(parts) > self.n:
            parts = sorted(parts, key=_logprob_per_token, reverse=True)[: self.n]
            return [part._replace(output=output) for output, part in enumerate(parts)]
        return sorted(parts)


def _logprob_per_token(part: OutputDelta) -> float:
    return part.event.cumulative_logprob / max(1, part.event.position)


def parse(inputs: Mapping[str, Array], parameters: Mapping[str, Any], limits: Limits) -> Generation:
    """Parse a request to the model `llm`.

    Args:
        inputs: its tensors by name; not kept.
        parameters: Triton's request parameters; over HTTP also JSON keys that are not inputs.
        limits: of the engine.

    Raises:
        RequestError: invalid request; the message starts with the client's name of the input.
    """
    values = contract.read_request(inputs)
    prompt_tensor = values.pop("prompt_tensor", None)
    if prompt_tensor not in (None, *_PROMPT_TENSORS):
        raise RequestError(f"allowed: {', '.join(_PROMPT_TENSORS)}", "prompt_tensor")
    prompt_ids = _prompt(values.pop("input_ids", None), prompt_tensor or "input_ids", limits)
    values, names = _merge(_join_biases(values), request_parameters.read(parameters))
    options = _request_options(values, names)
    n, best_of = _num_outputs(options, names)
    echo = _echo(options, values, names)
    params = _sampling(values, names, limits.vocab_size)
    _check_search(options, names, params.beam_width)
    if params.max_tokens == 0:
        _check_scoring(options, params, names, echo)
    structured = parse_guide(options.guided_decoding_guide_type, options.guided_decoding_guide)
    if structured is not None and params.ignore_eos:
        raise RequestError(
            "cannot be combined with a grammar, which determines the end", names["ignore_eos"]
        )
    check_length(
        len(prompt_ids), params.max_tokens, limits.max_model_len, prompt_tensor or "input_ids"
    )
    return Generation(
        prompt_ids=prompt_ids,
        params=params,
        cache_salt=_salt(options.cache_salt),
        tenant=options.cache_salt,  # unless an API key says whose it is
        priority_class=_priority_class(options.priority_class, names),
        deadline_ms=options.deadline_ms,
        cache_priority=options.cache_priority,
        cache_ttl_s=options.cache_ttl_s,
        stream=options.stream,
        n=n,
        best_of=best_of,
        speculation=_speculation(options.speculation),
        structured=structured,
        return_timing=options.return_timing,
        echo=echo,
        detokenized=prompt_tensor is not None,
        kept=_kept(options, names, limits.special_tokens),
    )


def failure(error: InflightError) -> dict[str, Array]:
    """The tensors of the model `llm` for a stream that fails after its first response."""
    return {
        contract.DETOKENIZE_IDS.name: np.array([], np.int32),
        contract.DETOKENIZE_STATE.name: np.array([], np.int64),
        contract.DETOKENIZE_ERROR.name: write_error(error),
    }


def write_error(error: InflightError) -> Array:
    """The content of `prompt_error` or `detokenize_error`."""
    # A lone surrogate, which JSON could carry and UTF-8 cannot, becomes a question mark.
    message = str(error).encode(errors="replace").decode()
    found = StepError(error.kind, message[:MAX_ERROR_CHARACTERS])
    return np.array([msgspec.json.encode(found)], object)


def read_error(tensor: contract.Tensor, array: Array) -> InflightError:
    """Parse the error of the step before. A client may send the tensor itself; then only its own
    request fails.

    Args:
        tensor: `contract.PROMPT_ERROR` or `contract.DETOKENIZE_ERROR`.

    Raises:
        RequestError: not written by `write_error`.
    """
    text: str = contract.read(tensor, array)
    try:
        if len(text) > _MAX_STEP_ERROR_CHARACTERS:
            raise ValueError("too long")
        found = msgspec.json.decode(text, type=StepError)
        if found.kind not in KINDS or len(found.message) > MAX_ERROR_CHARACTERS:
            raise ValueError("not a step's")
    except ValueError:  # msgspec's errors are ValueErrors too
        raise RequestError(
            f"is set only by {_WRITTEN_BY[tensor.name]}; omit it", tensor.name
        ) from None
    return from_kind(found.kind, found.message)


def merge(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """Merge two consecutive events of one request; `earlier` must not be used any more.

    Its lists are extended: new ones for each event would take quadratic time for an output that is
    not streamed.
    """
    earlier.token_ids.extend(later.token_ids)
    earlier.candidates.extend(later.candidates)
    earlier.prompt_candidates.extend(later.prompt_candidates)
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids,
        window=earlier.window,
        num_cached_tokens=earlier.num_cached_tokens,
        candidates=earlier.candidates,
        prompt_candidates=earlier.prompt_candidates,
    )


def shown_ids(event: TokenEvent, kept: Collection[int]) -> list[int]:
    """The new ids of an output, for `Detokenizer.delta_with_kept`.

    Args:
        kept: special tokens that stay in the text, but for the one that ends the output.
    """
    ids = mark_kept(event.token_ids, kept)
    if ids and event.finish_reason is FinishReason.STOP:
        ids[-1] = event.token_ids[-1]
    return ids


def outputs(
    parts: list[OutputDelta],
    num_input_tokens: int,
    prompt_candidates: list[list[Candidate]] | None = None,
    kept: Collection[int] = (),
) -> dict[str, Array]:
    """The tensors of one response of the model `llm`.

    Args:
        parts: of different outputs.
        num_input_tokens: tokens of the prompt.
        prompt_candidates: new prompt candidates (see `TokenEvent`); None for none.
        kept: special tokens that stay in the text.
    """
    output_ids: list[int] = []
    detokenize_ids: list[int] = []
    state: list[int] = []
    for _, event, echo in parts:
        new = echo + event.token_ids
        # With echo the prompt is part of the text, so there is no context before it.
        window = [] if echo else event.window
        output_ids += new
        detokenize_ids += window + (echo + shown_ids(event, kept) if kept else new)
        state += [len(window) + len(new), len(window), event.trim, int(event.is_last)]
        state += [event.request_id, event.position]
    events = [part.event for part in parts]
    return {
        "output_ids": np.array(output_ids, np.int32),
        "detokenize_ids": np.array(detokenize_ids, np.int32),
        "detokenize_state": np.array(state, np.int64),
        "index": np.array([part.output for part in parts], np.uint32),
        "finish_reason": _strings(*[str(event.finish_reason or "") for event in events]),
        "num_input_tokens": np.array([num_input_tokens], np.uint32),
        "num_output_tokens": np.array([len(event.token_ids) for event in events], np.uint32),
        "cumulative_logprob": np.array([event.cumulative_logprob for event in events], np.float32),
        "logprobs": _strings(*[_logprobs(event.candidates) for event in events]),
        "prompt_logprobs": _strings(_logprobs(prompt_candidates or [])),
        "draft_stats": _strings(*[_drafts(event) for event in events]),
    }


def _drafts(event: TokenEvent) -> str:
    """Draft statistics, timing and stop word, at the end of an output with drafts or
    `return_timing`."""
    if not event.is_last or (event.num_drafted is None and event.timing is None):
        return ""
    found: dict[str, Any] = {}
    if event.num_drafted is not None:
        found = {
            "num_drafted": event.num_drafted,
            "num_accepted": event.num_accepted,
            "num_steps": event.num_steps,
            "tokens_per_step": round(event.position / max(1, event.num_steps), 3),
        }
    if event.timing is not None:
        found["timing"] = msgspec.structs.asdict(event.timing)
        if event.stop_word:
            found["stop_word"] = event.stop_word
    return json.dumps(found)


def _logprobs(candidates: list[list[Candidate]]) -> str:
    """In the form of vLLM's backend for Triton; null for the first token of a prompt."""
    if not candidates:
        return ""
    return json.dumps(
        [
            {
                str(one.token_id): {
                    "logprob": one.logprob,
                    "rank": one.rank,
                    "decoded_token": one.text,
                }
                for one in of_token
            }
            or None
            for of_token in candidates
        ],
        ensure_ascii=False,
    )


def _strings(*texts: str) -> Array:
    return np.array([text.encode() for text in texts], object)


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
    return ids


def _join_biases(values: dict[str, Any]) -> dict[str, Any]:
    """Combine the two logit_bias tensors into one value."""
    ids, biases = values.get("logit_bias_ids"), values.get("logit_bias_values")
    if ids is None and biases is None:
        return values
    if ids is None or biases is None or len(ids) != len(biases):
        num_ids, num_biases = (0 if one is None else len(one) for one in (ids, biases))
        raise RequestError(
            f"{num_ids} ids and {num_biases} values; allowed: as many as of logit_bias_values",
            "logit_bias_ids",
        )
    rest = {name: one for name, one in values.items() if not name.startswith("logit_bias_")}
    return rest | {"logit_bias": list(zip(ids, biases, strict=True))}


def _merge(
    values: dict[str, Any], parameters: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values under our names, and the client's name of each. Tensors precede parameters."""
    values = dict(values)
    names = {name: name for name in _OPTION_NAMES} | {field.name: field.name for field in OPTIONS}
    for field in OPTIONS:
        for alias in field.option.aliases:
            if alias in values:
                if field.name in values:
                    raise RequestError(f"is another name of {field.name}; send one of them", alias)
                values[field.name] = values.pop(alias)
                names[field.name] = alias
    where = sampling_parameters.PARAM
    text = values.pop(where, parameters.pop(where, None))
    if text is not None:
        for name, value in sampling_parameters.parse(text).items():
            if name in values:
                raise RequestError(
                    f"{name} is also set by the tensor {names[name]}; send one of them", where
                )
            values[name] = value
            names[name] = f"{where}: {name}"
    for name, value in parameters.items():
        if name not in values:
            values[name] = value
            names[name] = f"{request_parameters.WHERE}: {name}"
    if values.pop("return_log_probs", False):
        values.setdefault("num_logprobs", 0)
    return values, names


def _num_outputs(options: RequestOptions, names: dict[str, str]) -> tuple[int, int]:
    """n and best_of."""
    n = options.n
    best_of = n if options.best_of is None else options.best_of
    if best_of < n:
        raise RequestError(f"{best_of} is less than n ({n})", names["best_of"])
    if best_of > n and options.stream:
        raise RequestError(
            "cannot be combined with stream: which outputs are best is known only at the end",
            names["best_of"],
        )
    return n, best_of


def _check_search(options: RequestOptions, names: dict[str, str], beam_width: int) -> None:
    """Reject options that cannot be combined with beam search, besides `SamplingParams`."""
    if beam_width == 1:
        return
    n = options.n
    if n > beam_width:
        raise RequestError(f"{n} is more than beam_width ({beam_width})", names["n"])
    grammar = "a grammar follows one output"
    for name, is_set, reason in (
        (
            "best_of",
            options.best_of not in (None, n),
            "beam_width is the number of beams, and n the number of outputs returned",
        ),
        ("stream", options.stream, "which outputs are best is known only at the end"),
        (
            "speculation",
            options.speculation not in (None, "off", "0"),
            "a draft is verified against one next token, and beams have several",
        ),
        (
            "guided_decoding_guide_type",
            options.guided_decoding_guide_type is not None,
            grammar,
        ),
        ("guided_decoding_guide", options.guided_decoding_guide is not None, grammar),
    ):
        if is_set:
            raise RequestError(
                f"cannot be combined with beam_width {beam_width}: {reason}", names[name]
            )


def _kept(
    options: RequestOptions, names: dict[str, str], special_tokens: Mapping[str, int]
) -> frozenset[int]:
    """The special tokens that stay in the text."""
    if not options.skip_special_tokens:
        return frozenset(special_tokens.values())
    for text in options.keep_special_tokens:
        if text not in special_tokens:
            raise RequestError(
                f"{text!r} is not a special token of this model; allowed: special_tokens of the "
                "description by the model tokenizer",
                names["keep_special_tokens"],
            )
    return frozenset(special_tokens[text] for text in options.keep_special_tokens)


def _echo(options: RequestOptions, values: dict[str, Any], names: dict[str, str]) -> bool:
    """Whether the prompt precedes the output. As in OpenAI's API, num_logprobs then applies to the
    prompt as well."""
    echo, excluded = options.echo, options.exclude_input_in_output
    if echo is not None and echo == excluded:
        raise RequestError(
            f"{_json(echo)} contradicts exclude_input_in_output ({_json(excluded)}); send one of "
            "them",
            names["echo"],
        )
    if echo and "num_logprobs" in values:
        values.setdefault("num_prompt_logprobs", values["num_logprobs"])
    return bool(echo) if excluded is None else not excluded


def _check_scoring(
    options: RequestOptions, params: SamplingParams, names: dict[str, str], echo: bool
) -> None:
    """With max_tokens 0: require a report on the prompt, and no option about outputs."""
    if not echo and params.num_prompt_logprobs is None:
        raise RequestError(
            f"0 is out of range; allowed: -1, [1, {MAX_TOKENS_LIMIT}], and 0 with echo "
            "or num_prompt_logprobs",
            names["max_tokens"],
        )
    for name, default in (("n", 1), ("best_of", 1), ("guided_decoding_guide", None)):
        if getattr(options, name) not in (default, None):
            raise RequestError(
                "cannot be combined with max_tokens 0, which generates nothing", names[name]
            )


def _json(value: bool) -> str:
    return "true" if value else "false"


def _speculation(text: str | None) -> int | None:
    """auto, off or a number of drafts."""
    if text is None:
        return None
    named = {"auto": AUTO_DRAFTS, "off": 0}
    if text in named:
        return named[text]
    if not (text.isdecimal() and text.isascii() and int(text[:4]) <= MAX_DRAFTS):
        raise RequestError(
            f"{text[:32]!r} is unknown; allowed: auto, off, or 0 to {MAX_DRAFTS}", "speculation"
        )
    return int(text)


def _priority_class(name: str, names: dict[str, str]) -> PriorityClass:
    try:
        return PriorityClass(name)
    except ValueError:
        raise RequestError(
            f"{name[:32]!r} is unknown; allowed: {', '.join(PriorityClass)}",
            names["priority_class"],
        ) from None


def _sampling(values: dict[str, Any], names: dict[str, str], vocab_size: int) -> SamplingParams:
    chosen: dict[str, Any] = {}
    for field in SAMPLING_OPTIONS:
        if field.name in values:
            value = values[field.name]
            chosen[field.name] = tuple(value) if field.is_list else value
    for name in ("stop_words", "bad_words"):
        # Some gateways send a single empty string for "none".
        if chosen.get(name) == ("",):
            chosen[name] = ()
    if chosen.get("allowed_token_ids") == ():
        raise RequestError(
            "is empty, so no token could be sampled; omit it to allow all",
            names["allowed_token_ids"],
        )
    with client_names(names):
        params = SamplingParams(**chosen)
        params.check_vocabulary(vocab_size)
        return params


def _request_options(values: dict[str, Any], names: dict[str, str]) -> RequestOptions:
    chosen = {field.name for field in REQUEST_OPTIONS} & values.keys()
    with client_names(names):
        return RequestOptions(**{name: values[name] for name in chosen})


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name an option as the client did."""
    try:
        yield
    except RequestError as error:
        text = str(error).removeprefix(f"{error.param}: ")
        raise RequestError(text, names.get(error.param or "", error.param)) from None


def _salt(salt: str) -> str:
    if len(salt) > MAX_SALT_LENGTH or not salt.isprintable():
        raise RequestError(
            f"allowed: up to {MAX_SALT_LENGTH} characters, all printable", "cache_salt"
        )
    return salt
