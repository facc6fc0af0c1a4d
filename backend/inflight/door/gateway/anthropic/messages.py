"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.anthropic.events import MessageEvents
from inflight.door.gateway.anthropic.fields import NAMING, CountRequest, MessagesRequest, parse
from inflight.door.gateway.anthropic.result import MessageResponse
from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.openai.chat import chat_model
from inflight.door.gateway.reply import StreamedReply, WholeReply, json_response


class Messages:
    """The routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        gateway = self._gateway
        fields = await gateway.read_fields(request, MessagesRequest, parse)
        served = await gateway.find(request, fields.model)
        conversation = fields.to_conversation(served.description)
        call, plan = conversation.call(served, fields.options(), fields.max_tokens, NAMING)
        stream = await gateway.generate(request, served, [call])
        response = MessageResponse(served.id, plan, fields.shows_reasoning)
        if fields.stream:
            return StreamedReply(stream, MessageEvents(response), gateway.busy_poll)
        return WholeReply(stream, response, gateway.busy_poll)

    async def count_tokens(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        gateway = self._gateway
        fields = await gateway.read_fields(request, CountRequest, parse)
        served = await gateway.find(request, fields.model)
        conversation = fields.to_conversation(served.description)
        await gateway.admit(request, chat_model(served))
        return json_response({"input_tokens": await conversation.count_tokens(served, NAMING)})
