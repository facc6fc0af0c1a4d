"""Responses of chats and completions."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

ChatFinish = Literal["stop", "length", "tool_calls"]
CompletionFinish = Literal["stop", "length"]


class CachedTokens(msgspec.Struct):
    """Attributes:
    cached_tokens: of the prompt, from the prefix cache.
    """

    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    """Attributes:
    bytes: of the token's text in UTF-8.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob, kw_only=True):
    """Attributes:
    top_logprobs: of the most probable tokens.
    """

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(msgspec.Struct):
    """Attributes:
    arguments: a JSON object, as a string.
    """

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(msgspec.Struct):
    """Attributes:
    content: null if there are tool calls alone.
    reasoning: the same text as reasoning_content.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatCompletion(msgspec.Struct):
    """A chat that is complete."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionCallDelta(msgspec.Struct):
    """Attributes:
    arguments: the next part of them.
    """

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """Attributes:
    id: in the first delta of a call, as is its name.
    """

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatCompletionChunk(msgspec.Struct):
    """The data of an event of a streamed chat.

    Attributes:
        usage: with stream_options; null but in the last chunk, or in each with
            continuous_usage_stats.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Attributes:
    token_logprobs: null for the first token of an echoed prompt.
    text_offset: of each token, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish


class Completion(msgspec.Struct):
    """Completions that are complete."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish | None


class CompletionChunk(msgspec.Struct):
    """The data of an event of streamed completions.

    Attributes:
        usage: with stream_options; null but in the last chunk, or in each with
            continuous_usage_stats.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
