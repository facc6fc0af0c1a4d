"""The fields of requests to /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from inflight.door.gateway.anthropic.cache_control import ttl_of
from inflight.door.gateway.anthropic.conversation import messages_of
from inflight.door.gateway.anthropic.tools import tooling_of
from inflight.door.gateway.directory import Description
from inflight.door.gateway.openai import fields
from inflight.door.gateway.openai.conversation import (
    Conversation,
    Naming,
    invalid,
    not_supported,
    reasoning_variables,
)
from inflight.door.gateway.openai.fields import (
    CACHED_PRIORITY,
    FIELDS_OF_TENSORS,
    Fields,
    Int32,
    JsonSchema,
    ResponseFormat,
)

NAMING = Naming(
    FIELDS_OF_TENSORS
    | {
        "stop_words": "stop_sequences",
        "guided_decoding_guide": "output_config.format",
        "guided_decoding_guide_type": "output_config.format",
    },
    (
        (r"^stop\b", "stop_sequences"),
        (r"^response_format\.json_schema", "output_config.format"),
        (r"^response_format", "output_config.format"),
        (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
        (r"^(tools\[\d+\])\.function", r"\1"),
        (r"^tool_choice\.function", "tool_choice"),
        # Of a chat template without tools, and of a choice without tools.
        (r"a tool_choice of required or of a function$", "a tool_choice of any or of a tool"),
        (r"^tool_choice: required needs", "tool_choice: any needs"),
    ),
)
DISABLED = "disabled"
_THINKING = ("enabled", "adaptive", DISABLED)
# Members of a request that have no effect here.
_IGNORED = frozenset(
    {
        *("betas", "cache_control", "container", "context_management", "diagnostics"),
        *("inference_geo", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
    }
)
R = TypeVar("R", bound=msgspec.Struct)


class Thinking(msgspec.Struct):
    """Attributes:
    type: enabled, adaptive or disabled.
    display: omitted leaves the text of the reasoning out.
    """

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """A request to count the tokens of a prompt."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def to_conversation(self, description: Description) -> Conversation:
        """The request, in no wire format. Raises Problem."""
        is_on = None
        if self.thinking is not None:
            if self.thinking.type not in _THINKING:
                raise invalid("thinking.type", ", ".join(_THINKING))
            is_on = self.thinking.type != DISABLED
        effort = self.output_config.effort if self.output_config is not None else None
        messages = messages_of(self.system, self.messages)
        tooling = tooling_of(self.tools or [], self.tool_choice)
        variables = reasoning_variables(description, is_on, effort)
        last = messages[-1]
        is_continued = last["role"] == "assistant" and "tool_calls" not in last
        return Conversation(messages, tooling, variables, is_continued)


class MessagesRequest(CountRequest, kw_only=True):
    """A request.

    Attributes:
        max_tokens: as many as the context allows, if that are fewer.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def shows_reasoning(self) -> bool:
        thinking = self.thinking
        return thinking is None or (thinking.type != DISABLED and thinking.display != "omitted")

    def options(self) -> Fields:
        """All but the prompt and tools, as a chat of OpenAI has them. Raises Problem."""
        ttl_s = ttl_of(self.cache_control, self.system, self.tools, self.messages)
        return Fields(
            model=self.model,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            response_format=self._format(),
            cache_priority=None if ttl_s is None else CACHED_PRIORITY,
            cache_ttl_s=ttl_s,
        )

    def _format(self) -> ResponseFormat | None:
        wanted = self.output_config.format if self.output_config is not None else None
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            raise not_supported("output_config.format.type", wanted.type, "json_schema")
        return ResponseFormat(wanted.type, JsonSchema(wanted.schema))


def parse(body: bytes, kind: type[R], is_strict: bool) -> tuple[R, list[str]]:
    """A request, and the names of its fields that are not known. Raises Problem."""
    return fields.parse(body, kind, is_strict, _IGNORED)
