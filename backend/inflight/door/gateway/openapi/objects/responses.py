"""Responses of OpenAI's responses API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inflight.door.gateway.openapi.objects.completions import ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputItem(msgspec.Struct, tag_field="type"):
    id: str
    status: Status


class MessageItem(OutputItem, tag="message"):
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(OutputItem, tag="reasoning"):
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(OutputItem, tag="function_call"):
    """Attributes:
    arguments: a JSON object, as a string.
    """

    call_id: str
    name: str
    arguments: str


class Response(msgspec.Struct):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(msgspec.Struct):
    """The data of an event of a streamed response.

    Attributes:
        type: the name of the event, such as response.output_text.delta, which determines the
            further members.
    """

    type: str
    sequence_number: int
