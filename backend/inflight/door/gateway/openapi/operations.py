"""The operations of the gateway: requests, responses and statuses of each route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.door.gateway.anthropic.fields import CountRequest, MessagesRequest
from inflight.door.gateway.openai.chat import ChatRequest
from inflight.door.gateway.openai.closed import EMBEDDINGS
from inflight.door.gateway.openai.completions import CompletionRequest
from inflight.door.gateway.openai.responses.fields import ResponsesRequest
from inflight.door.gateway.openai.tokens import DetokenizeRequest, TokenizeRequest
from inflight.door.gateway.openapi.objects.completions import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from inflight.door.gateway.openapi.objects.messages import Message, MessageEvent, TokenCount
from inflight.door.gateway.openapi.objects.models import (
    Model,
    ModelList,
    ModelStates,
    Text,
    TokenizerInfo,
    Tokens,
    Version,
)
from inflight.door.gateway.openapi.objects.responses import Response, ResponseEvent

JSON, SSE, TEXT = "application/json", "text/event-stream", "text/plain"

# Of all routes: a request that is not valid HTTP, or a key without a right.
_ANY = (400, 431, 500, 503)
_WITH_KEYS = (401, 403)
# Of a body, and of the model that it names.
_BODY = (400, 404, 408, 413, 415, 500, 503)
_RUN = (*_BODY, 504)
_DONE = "The last event's data is `[DONE]`."
_ERROR_EVENT = "An error after the first event is an event with `error`."
_NOT_STORED = "Responses are not stored: always 404."


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        path: in OpenAPI's form, with {name} for a parameter.
        name: `operationId`.
        summary: one line.
        tag: the API that it belongs to.
        request: the struct that parses its body; None without a body.
        response: the struct of its body with status 200, or a media type; None: it never succeeds,
            or its body is empty.
        event: the struct of the data of a server-sent event, with `stream`.
        event_notes: how a stream ends.
        errors: statuses of errors, beside those of all operations.
        query: parameters of the query, with their descriptions.
        is_probe: needs no key.
        is_limited: counts towards the limits of a key, 429 above them.
        succeeds: has a response with status 200.
    """

    method: str
    path: str
    name: str
    summary: str
    tag: str
    request: type[Any] | None = None
    response: type[Any] | str | None = None
    event: type[Any] | None = None
    event_notes: str = ""
    errors: tuple[int, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)
    is_probe: bool = False
    is_limited: bool = False
    succeeds: bool = True

    @property
    def is_anthropic(self) -> bool:
        """Whether its errors have Anthropic's form."""
        return self.tag == "Anthropic"

    def statuses(self, has_keys: bool) -> list[int]:
        """Of its errors."""
        found = {*_ANY, *self.errors}
        if has_keys and not self.is_probe:
            found |= {*_WITH_KEYS, *((429,) if self.is_limited else ())}
        return sorted(found)


_GENERATIONS = [
    Operation(
        *("post", "/v1/chat/completions", "createChatCompletion", "Complete a chat.", "OpenAI"),
        request=ChatRequest,
        response=ChatCompletion,
        event=ChatCompletionChunk,
        event_notes=f"{_DONE} {_ERROR_EVENT}",
        errors=_RUN,
        is_limited=True,
    ),
    Operation(
        *("post", "/v1/completions", "createCompletion", "Complete texts or tokens.", "OpenAI"),
        request=CompletionRequest,
        response=Completion,
        event=CompletionChunk,
        event_notes=f"{_DONE} {_ERROR_EVENT}",
        errors=_RUN,
        is_limited=True,
    ),
    Operation(
        *("post", "/v1/responses", "createResponse", "Create a response.", "OpenAI"),
        request=ResponsesRequest,
        response=Response,
        event=ResponseEvent,
        event_notes="The last event is response.completed, response.incomplete or response.failed.",
        errors=_RUN,
        is_limited=True,
    ),
    Operation(
        *("post", "/v1/messages", "createMessage", "Create a message.", "Anthropic"),
        request=MessagesRequest,
        response=Message,
        event=MessageEvent,
        event_notes="The last event is message_stop, or error.",
        errors=_RUN,
        is_limited=True,
    ),
    Operation(
        *("post", "/v1/messages/count_tokens", "countTokens", "Count a prompt's tokens."),
        "Anthropic",
        request=CountRequest,
        response=TokenCount,
        errors=_RUN,
        is_limited=True,
    ),
]
_STORED = [
    Operation(
        *(method, "/v1/responses/{path}", f"{method}StoredResponse", _NOT_STORED, "OpenAI"),
        errors=(404,),
        succeeds=False,
    )
    for method in ("get", "post", "delete")
]
_MODELS = [
    Operation(
        *("get", "/v1/models", "listModels", "List the models.", "OpenAI"), response=ModelList
    ),
    Operation(
        *("get", "/v1/models/{model}", "retrieveModel", "Describe a model.", "OpenAI"),
        response=Model,
        errors=(404,),
    ),
    *(
        Operation(
            *("post", f"/v1/models/{{model}}/{verb}", f"{verb}Model"),
            f"{verb.capitalize()} a model; with --model-control and an admin's key.",
            "Models",
            response=ModelStates,
            errors=(404, 504),
        )
        for verb in ("load", "unload")
    ),
]
_TOKENS = [
    Operation(
        *("post", "/tokenize", "tokenize", "Tokenize a text or a chat.", "Tokens"),
        request=TokenizeRequest,
        response=Tokens,
        errors=_RUN,
        is_limited=True,
    ),
    Operation(
        *("post", "/detokenize", "detokenize", "The text of tokens.", "Tokens"),
        request=DetokenizeRequest,
        response=Text,
        errors=_RUN,
        is_limited=True,
    ),
    Operation(
        *("get", "/tokenizer_info", "describeTokenizer", "Describe a tokenizer.", "Tokens"),
        response=TokenizerInfo,
        errors=(404,),
        query={"model": "By default the only one."},
        is_limited=True,
    ),
]
_CLOSED = [
    Operation(
        *("post", path, f"{path.strip('/').replace('/', '_')}", "Is not supported.", "OpenAI"),
        errors=_BODY,
        succeeds=False,
    )
    for path in EMBEDDINGS
]
_SERVER = [
    *(
        Operation(
            *("get", path, name, summary, "Server"),
            is_probe=True,
        )
        for path, name, summary in (
            ("/health", "health", "Whether the server is live."),
            ("/v2/health/live", "live", "Whether the server is live."),
            ("/ready", "ready", "Whether the server is ready."),
            ("/v2/health/ready", "v2Ready", "Whether the server is ready."),
        )
    ),
    Operation(
        *("get", "/version", "version", "The version of the package.", "Server"), response=Version
    ),
    Operation(
        *("get", "/metrics", "metrics", "Metrics in Prometheus's text format.", "Server"),
        response=TEXT,
        errors=(404,),
    ),
    Operation(
        *("get", "/openapi.json", "openapi", "This document.", "Server"),
        response=JSON,
    ),
]
OPERATIONS: tuple[Operation, ...] = (
    *_GENERATIONS,
    *_STORED,
    *_MODELS,
    *_TOKENS,
    *_CLOSED,
    *_SERVER,
)
