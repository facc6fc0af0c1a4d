"""Definition of a request option: its meaning, bounds and names, in one place.

A struct whose fields are annotated with `Option` is a table of options: `SamplingParams` for those
that concern sampling, `triton.request_options.RequestOptions` for those of a request as a whole.
Everything else about an option is derived from its entry: the check of its bounds
(`check_options`), its input tensors (`triton.contract`), its vLLM key (`triton.dialects`),
and the output of `make generate`: the inputs in the config.pbtxt files, the client's options, the
row parameters of the kernels and the reference page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from inflight.errors import RequestError

Datatype = Literal["STRING", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32"]
"""Triton's names of the types of tensors."""

Stage = Literal["penalty", "filter", "rare filter"]

MAX_TOKEN_ID = 2**31 - 1
MAX_STRING_BYTES = 256

_DATATYPES: dict[Any, Datatype] = {int: "INT32", float: "FP32", bool: "BOOL", str: "STRING"}


@dataclass(frozen=True, slots=True)
class Option:
    """Annotation of an option's field. Name, type and default are the field's.

    Attributes:
        meaning: sentences for the reference page; the first one alone is the client's docstring.
        low, high: bounds of a number, or of each bias of `logit_bias`.
        open_low, open_high: whether the bound itself is excluded.
        max_items: of a list.
        allowed: text of what is allowed, for errors and the reference page, instead of the bounds.
        default: meaning of the default, unless its value shows it.
        token_ids: whether the value names tokens, which must be in the vocabulary.
        datatype: of the tensor, if not that of the field's type.
        tensors: (name, datatype) of the option's tensors, if there are several.
        aliases: further tensors with the same meaning.
        vllm: its keys in `sampling_parameters`; None for its own name alone.
        client: its type in the client's options, if not that of the field; "" if the client does
            not have the option.
        stage: the sampler stage that it enables unless it has its default: a penalty, which counts
            tokens, or a filter. Rare filters cost an additional pass over the vocabulary.
        with_beams: whether it can be combined with a beam search. Penalties and filters cannot.
    """

    meaning: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    max_items: int | None = None
    allowed: str = ""
    default: str = ""
    token_ids: bool = False
    datatype: Datatype | None = None
    tensors: tuple[tuple[str, Datatype], ...] = ()
    aliases: tuple[str, ...] = ()
    vllm: tuple[str, ...] | None = None
    client: str | None = None
    stage: Stage | None = None
    with_beams: bool = True

    @property
    def interval(self) -> str:
        """The bounds as an interval; "" without bounds."""
        if self.low is None:
            return ""
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{left}{self.low}, {self.high}{right}"


@dataclass(frozen=True, slots=True)
class OptionField:
    """An entry of the table.

    Attributes:
        kind: type of the value, or of a list's items; `tuple` for pairs of a token id and a number.
        is_list: whether the value is a tuple of any length.
        default: the field's.
    """

    name: str
    kind: type
    is_list: bool
    default: Any
    option: Option

    @property
    def tensors(self) -> tuple[tuple[str, Datatype], ...]:
        """(name, datatype) of the input tensors; those of a list have any length."""
        if self.option.tensors:
            return self.option.tensors
        datatype = self.option.datatype or _DATATYPES[self.kind]
        return tuple((name, datatype) for name in (self.name, *self.option.aliases))

    @property
    def vllm_keys(self) -> tuple[str, ...]:
        return (self.name,) if self.option.vllm is None else self.option.vllm


def option_fields(table: type[msgspec.Struct]) -> tuple[OptionField, ...]:
    """The entries of a table, in the order of its fields."""
    hints = get_type_hints(table, include_extras=True)
    return tuple(
        _option_field(field.name, hints[field.name], field.default)
        for field in msgspec.structs.fields(table)
    )


def _option_field(name: str, hint: Any, default: Any) -> OptionField:
    """Parse Annotated[T, Option], T a type, a tuple of any length, or one of these or None."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{name}: is not annotated with an Option")
    annotation, option = get_args(hint)
    if get_origin(annotation) in (Union, UnionType):
        annotation, _ = get_args(annotation)
    is_list = get_origin(annotation) is tuple
    if is_list:
        annotation, _ = get_args(annotation)
    return OptionField(name, get_origin(annotation) or annotation, is_list, default, option)


def check_options(values: msgspec.Struct, fields: Iterable[OptionField]) -> None:
    """Check the bounds of all options that differ from their defaults.

    Raises:
        RequestError: one is out of bounds; names it.
    """
    for field in fields:
        value = getattr(values, field.name)
        if value is not field.default and value != field.default:
            check_option(field, value)


def check_option(field: OptionField, value: Any) -> None:
    """Check a value, not None, against the bounds of an option.

    Raises:
        RequestError: it is out of bounds; names the option.
    """
    option = field.option
    if field.is_list:
        _check_count(field, value)
        if field.kind is str:
            for text in value:
                _check_string(field.name, text)
        elif field.kind is int:
            check_token_ids(field.name, value)
        else:
            check_token_ids(field.name, (token_id for token_id, _ in value))
            for _, number in value:
                _check_number(field.name, number, option)
    elif option.token_ids:
        check_token_ids(field.name, (value,))
    elif option.low is not None:
        _check_number(field.name, value, option)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int | None = None) -> None:
    """
    Raises:
        RequestError: one is not a token id, or not in a vocabulary of this size; names the option.
    """
    for token_id in token_ids:
        if token_id < 0 or token_id > MAX_TOKEN_ID:
            raise RequestError(f"{token_id} is not a token id; allowed: 0 or more", name)
        if vocab_size is not None and token_id >= vocab_size:
            raise RequestError(
                f"{token_id} is not in the vocabulary; allowed: 0 to {vocab_size - 1}", name
            )


def _check_number(name: str, value: float, option: Option) -> None:
    low, high = option.low, option.high
    assert low is not None and high is not None
    finite = not isinstance(value, float) or math.isfinite(value)
    above = value > low if option.open_low else value >= low
    below = value < high if option.open_high else value <= high
    if not (finite and above and below):
        allowed = option.allowed or option.interval
        raise RequestError(f"{value} is out of range; allowed: {allowed}", name)


def _check_count(field: OptionField, values: tuple[Any, ...]) -> None:
    limit = field.option.max_items
    if limit is not None and len(values) > limit:
        what = "strings" if field.kind is str else "tokens"
        raise RequestError(f"{len(values)} {what}; allowed: {limit}", field.name)


def _check_string(name: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= MAX_STRING_BYTES:
        raise RequestError(
            f"a string of {size} bytes; allowed: 1 to {MAX_STRING_BYTES} bytes each", name
        )
