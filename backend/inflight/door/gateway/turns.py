"""One output of a chat: content, reasoning and tool calls from deltas, in no wire format."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inflight.door.gateway.directory import Description
from inflight.door.gateway.generation import Delta
from inflight.door.gateway.parsers import (
    CallArguments,
    CallBegun,
    Formats,
    Guide,
    OutputParser,
    Piece,
    Reasoning,
    detect,
    guide_for,
    markers,
    opens_reasoning,
    parser_for,
    schemas_of,
)
from inflight.errors import RequestError

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
NONE, AUTO = "none", "auto"


class Turn:
    """Splits an output into pieces while it is generated.

    Args:
        parser: of the output.
        max_calls: further tool calls are dropped; None for no limit.

    Attributes:
        finish_reason: stop, length or tool_calls at the end, else empty.
        call_ids: of the calls that have begun.
        num_reasoning_tokens: about, as a token may end the reasoning.
    """

    def __init__(self, parser: OutputParser, max_calls: int | None = None) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._is_reasoning = False
        self.finish_reason = ""
        self.call_ids: list[str] = []
        self.num_reasoning_tokens = 0

    def feed(self, delta: Delta) -> list[Piece]:
        """The pieces that are certain after the next delta; all that remain, if it is the last."""
        pieces = self._parser.feed(delta.text_output)
        if delta.finish_reason:
            pieces += self._parser.finish()
        if self._max_calls is not None:
            pieces = [one for one in pieces if not self._is_surplus(one)]
        for piece in pieces:
            self._is_reasoning = isinstance(piece, Reasoning)
            if isinstance(piece, CallBegun):
                self.call_ids.append(f"call_{secrets.token_hex(12)}")
        if self._is_reasoning:
            self.num_reasoning_tokens += delta.num_output_tokens
        if delta.finish_reason:
            has_calls = bool(self.call_ids) and delta.finish_reason == STOP
            self.finish_reason = TOOL_CALLS if has_calls else delta.finish_reason
        return pieces

    def _is_surplus(self, piece: Piece) -> bool:
        assert self._max_calls is not None
        return isinstance(piece, CallBegun | CallArguments) and piece.index >= self._max_calls


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """How the outputs of a chat are constrained, and split into pieces.

    Attributes:
        tensors: of the tools and their guide.
        tool_format, reasoning_format, schemas, in_reasoning: see `parser_for`.
        max_calls: of each output.
        special: markers of the formats that are special tokens of the model; the text of the
            outputs has them.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning_format: str | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    in_reasoning: bool = False
    max_calls: int | None = None
    special: tuple[str, ...] = ()

    @property
    def reasons(self) -> bool:
        """Whether outputs may have reasoning."""
        return self.reasoning_format is not None

    def turn(self) -> Turn:
        """For one output."""
        parser = parser_for(
            self.tool_format,
            self.reasoning_format,
            self.schemas,
            self.in_reasoning,
            self.special,
        )
        return Turn(parser, self.max_calls)


@dataclass(frozen=True, slots=True)
class Tooling:
    """What a request says about tools.

    Attributes:
        tools: OpenAI's objects.
        choice: OpenAI's tool_choice.
        is_parallel: whether an output may have several calls.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str | Mapping[str, Any] = AUTO
    is_parallel: bool = True


def plan_turns(
    description: Description,
    tooling: Tooling,
    variables: Mapping[str, Any] | None = None,
    *,
    has_guide: bool = False,
) -> TurnPlan:
    """The plan of a chat's outputs.

    Args:
        description: of the model.
        variables: of the chat template.
        has_guide: the request constrains its output itself, so that it has no reasoning.

    Raises:
        RequestError: naming the field and what is allowed.
    """
    has_tools = bool(tooling.tools) and tooling.choice != NONE
    template = description.chat_template or ""
    if has_tools and description.tool_chat_template is not None:
        template = description.tool_chat_template
    formats = _formats(template)
    reasoning = None if has_guide else formats.reasoning
    in_reasoning = reasoning is not None and opens_reasoning(template, variables)
    if not has_tools:
        guide_for(formats.tools, tooling.tools, tooling.choice)  # checks them
        return _without_tools(description, reasoning, in_reasoning)
    guide = guide_for(
        formats.tools,
        tooling.tools,
        tooling.choice,
        tooling.is_parallel,
        reasoning_format=reasoning,
        in_reasoning=in_reasoning,
    )
    if guide is not None and has_guide:
        raise RequestError(
            "cannot be combined with tools that constrain the output; omit one of them",
            "response_format",
        )
    tool_format = formats.tools
    if guide is not None:
        tool_format, reasoning = guide.tool_format, guide.reasoning_format
    if tool_format is None:
        raise RequestError(
            "are not supported by the chat template of this model; allowed: a tool_choice of "
            "required or of a function",
            "tools",
        )
    is_single = not tooling.is_parallel or not isinstance(tooling.choice, str)
    special = _special(description, Formats(tool_format, reasoning))
    return TurnPlan(
        _tool_tensors(tooling.tools, guide) | _kept(special),
        tool_format,
        reasoning,
        schemas_of(tooling.tools),
        in_reasoning,
        1 if is_single else None,
        special,
    )


def _tool_tensors(tools: Sequence[Mapping[str, Any]], guide: Guide | None) -> dict[str, Any]:
    tensors = {"tools": msgspec.json.encode(tools).decode()}
    if guide is not None:
        tensors["guided_decoding_guide_type"] = guide.guide_type
        tensors["guided_decoding_guide"] = guide.guide
    return tensors


def _without_tools(description: Description, reasoning: str | None, in_reasoning: bool) -> TurnPlan:
    special = _special(description, Formats(None, reasoning))
    return TurnPlan(
        _kept(special), reasoning_format=reasoning, in_reasoning=in_reasoning, special=special
    )


def _special(description: Description, formats: Formats) -> tuple[str, ...]:
    """The markers of formats that are special tokens of a model."""
    return tuple(one for one in markers(formats) if one in description.special_tokens)


def _kept(special: tuple[str, ...]) -> dict[str, Any]:
    return {"keep_special_tokens": list(special)} if special else {}


@functools.lru_cache(maxsize=64)
def _formats(template: str) -> Formats:
    return detect(template)
