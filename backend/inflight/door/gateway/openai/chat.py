"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.directory import ServedModel
from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.generation import Call
from inflight.door.gateway.openai.chat_events import ChatEvents, ChatResult, Shape
from inflight.door.gateway.openai.fields import (
    Fields,
    Int32,
    TokenCount,
    names_of,
    parse,
    tensors_of,
)
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import StreamedReply, WholeReply
from inflight.door.gateway.turns import AUTO, NONE, Tooling, TurnPlan, plan_turns


class ChatRequest(Fields, kw_only=True):
    """A request.

    Attributes:
        messages: OpenAI's messages, which Triton's model checks.
        max_completion_tokens: takes precedence over max_tokens; without both, as many tokens as the
            context allows.
        logprobs: report the log-probability of each token,
        top_logprobs: and of so many of the most probable ones.
        chat_template_kwargs: further variables of the chat template.
        include_reasoning: whether the response has the reasoning; true by default.
    """

    messages: Raw
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None

    @property
    def tooling(self) -> Tooling:
        choice = self.tool_choice
        if choice is None:
            choice = AUTO if self.tools else NONE
        return Tooling(self.tools or (), choice, self.parallel_tool_calls is not False)

    @property
    def num_logprobs(self) -> int | None:
        """Raises Problem."""
        if not self.logprobs:
            if self.top_logprobs:
                raise Problem("top_logprobs: allowed only with logprobs true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class Chat:
    """The route."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def respond(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        gateway = self._gateway
        chat = await gateway.read_fields(request, ChatRequest, parse)
        served = await gateway.find(request, chat.model)
        model = chat_model(served)
        gateway.check_variables(served, chat.chat_template_kwargs)
        tensors = _tensors(chat)
        plan = plan_turns(
            served.description,
            chat.tooling,
            chat.chat_template_kwargs,
            has_guide="guided_decoding_guide_type" in tensors,
        )
        names = names_of(chat, "top_logprobs")
        if "guided_decoding_guide" in plan.tensors:
            names["guided_decoding_guide"] = "tools"
        shape = _shape(chat, served.id, plan)
        call = Call(model, tensors | plan.tensors, names, chat.num_outputs)
        stream = await gateway.generate(request, served, [call])
        if chat.stream:
            events = ChatEvents(shape, chat.includes_usage, chat.continues_usage)
            return StreamedReply(stream, events, gateway.busy_poll)
        return WholeReply(stream, ChatResult(shape), gateway.busy_poll)


def chat_model(served: ServedModel) -> str:
    """Triton's name of the ensemble. Raises Problem: there is none."""
    model = served.member("chat")
    if model is None:
        raise Problem(
            f"model: {served.id} has no chat template; use /v1/completions", param="model"
        )
    return model


def _shape(chat: ChatRequest, model: str, plan: TurnPlan) -> Shape:
    return Shape(
        model,
        [plan.turn() for _ in range(chat.num_outputs)],
        num_logprobs=chat.num_logprobs,
        reasons=plan.reasons,
        shows_reasoning=chat.include_reasoning is not False,
    )


def _tensors(chat: ChatRequest) -> dict[str, Any]:
    messages = bytes(chat.messages).decode()
    if not messages.startswith("["):
        raise Problem("messages: is not an array; allowed: an array of messages", param="messages")
    max_tokens = chat.max_completion_tokens
    if max_tokens is None:
        max_tokens = chat.max_tokens
    tensors = {"messages": messages, **tensors_of(chat, -1 if max_tokens is None else max_tokens)}
    if chat.num_logprobs is not None:
        tensors["num_logprobs"] = chat.num_logprobs
    if chat.chat_template_kwargs:
        tensors["chat_template_kwargs"] = msgspec.json.encode(chat.chat_template_kwargs).decode()
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(chat, name) is not None:
            tensors[name] = getattr(chat, name)
    return tensors
