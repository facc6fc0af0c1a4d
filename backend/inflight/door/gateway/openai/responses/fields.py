"""The fields of a request to /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inflight.door.gateway.directory import Description
from inflight.door.gateway.openai.conversation import (
    Conversation,
    Naming,
    function_tool,
    invalid,
    not_supported,
    reasoning_variables,
    string_at,
)
from inflight.door.gateway.openai.fields import (
    FIELDS_OF_TENSORS,
    Fields,
    Int32,
    JsonSchema,
    ResponseFormat,
)
from inflight.door.gateway.openai.responses.items import messages_of
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.turns import AUTO, NONE, Tooling

REQUIRED = "required"

NAMING = Naming(
    FIELDS_OF_TENSORS
    | {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "num_logprobs": "top_logprobs",
        "guided_decoding_guide": "text.format",
        "guided_decoding_guide_type": "text.format",
    },
    (
        (r"^response_format\.json_schema", "text.format"),
        (r"^response_format", "text.format"),
        (r"^(tools\[\d+\])\.function", r"\1"),
        (r"^tool_choice\.function", "tool_choice"),
    ),
)
_STORED = "omit it, and send the whole conversation in input"
_LOGPROBS = "message.output_text.logprobs"
_CHOICES = (
    'none, auto, required, {"type": "function", "name": ...} or {"type": "allowed_tools", "mode": '
    '..., "tools": ...}'
)
_TOOL = 'function: {"type": "function", "name": ..., "parameters": ...}'
# Values that ask for what happens anyway.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((None, False), "responses are not stored; omit it"),
    "previous_response_id": ((None,), f"responses are not stored; {_STORED}"),
    "conversation": ((None,), f"conversations are not stored; {_STORED}"),
    "background": ((None, False), "is not supported; omit it"),
    "prompt": ((None,), "is not supported; use instructions and input"),
    "truncation": ((None, "disabled"), "is not supported; allowed: disabled"),
    "n": ((None, 1), "is not supported; use /v1/chat/completions"),
    "max_tool_calls": ((None,), "is not supported; omit it"),
    "max_tokens": ((None,), "is not supported; use max_output_tokens"),
    "response_format": ((None,), "is not supported; use text.format"),
}


class TextFormat(msgspec.Struct):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    """Attributes:
    effort: none switches reasoning off, if the model's chat template can do so.
    """

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Fields, kw_only=True):
    """A request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    top_logprobs: Int32 | None = None
    max_tool_calls: int | None = None

    def check(self) -> None:
        """Raises Problem: a field is known, but not supported."""
        for name, (allowed, what) in _UNSUPPORTED.items():
            if getattr(self, name) not in allowed:
                raise Problem(f"{name}: {what}", param=name, code="not_supported")

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens are reported at each place of the text; None for no
        report. Raises Problem."""
        if _LOGPROBS not in (self.include or ()):
            if self.top_logprobs:
                raise Problem(
                    f'top_logprobs: allowed only with include ["{_LOGPROBS}"]', param="top_logprobs"
                )
            return None
        return self.top_logprobs or 0

    def options(self) -> Fields:
        """All but the input, tools and their choice, as a chat has them."""
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return self
        schema = JsonSchema(wanted.schema) if wanted.type == "json_schema" else None
        return msgspec.structs.replace(self, response_format=ResponseFormat(wanted.type, schema))

    def to_conversation(self, description: Description) -> Conversation:
        """The request, in no wire format. Raises Problem."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        variables = reasoning_variables(description, False if effort == NONE else None, effort)
        return Conversation(messages_of(self.instructions, self.input), self._tooling(), variables)

    def _tooling(self) -> Tooling:
        tools = self.tools or []
        names = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        choice, allowed = _choice(self.tool_choice, names)
        converted = [function_tool(tool, "parameters") for tool in tools if tool["name"] in allowed]
        is_parallel = self.parallel_tool_calls is not False
        return Tooling(converted, choice if converted or choice == REQUIRED else NONE, is_parallel)


def _check_tool(tool: dict[str, Any], where: str) -> str:
    """The name of a tool. Raises Problem."""
    kind = string_at(tool, "type", where)
    if kind != "function":
        raise not_supported(f"{where}.type", kind, _TOOL)
    if tool.get("description") is not None:
        string_at(tool, "description", where)
    return string_at(tool, "name", where)


def _choice(
    given: str | dict[str, Any] | None, names: Sequence[str]
) -> tuple[str | dict[str, Any], Sequence[str]]:
    """OpenAI's tool_choice of a chat, and the names of the tools that may be called. Raises
    Problem."""
    if given is None:
        return AUTO, names
    if isinstance(given, str):
        if given not in (NONE, AUTO, REQUIRED):
            raise invalid("tool_choice", _CHOICES)
        return given, names
    kind = given.get("type")
    if kind == "function":
        return _function_choice(given, "tool_choice", names), names
    if kind != "allowed_tools":
        raise invalid("tool_choice", _CHOICES)
    mode, tools = given.get("mode"), given.get("tools")
    if mode not in (AUTO, REQUIRED):
        raise invalid("tool_choice.mode", "auto and required")
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise invalid("tool_choice.tools", 'an array of {"type": "function", "name": ...}')
    for index, tool in enumerate(tools):
        _function_choice(tool, f"tool_choice.tools[{index}]", names)
    return mode, [tool["name"] for tool in tools]


def _function_choice(given: dict[str, Any], where: str, names: Sequence[str]) -> dict[str, Any]:
    name = string_at(given, "name", where)
    if name not in names:
        raise invalid(f"{where}.name", "the name of one of the tools")
    return {"type": "function", "function": {"name": name}}
