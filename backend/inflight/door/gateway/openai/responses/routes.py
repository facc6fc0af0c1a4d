"""POST /v1/responses. Responses are not stored, so that no other request can name one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.openai.fields import parse
from inflight.door.gateway.openai.responses.events import ResponseEvents
from inflight.door.gateway.openai.responses.fields import NAMING, ResponsesRequest
from inflight.door.gateway.openai.responses.result import Response, ResponseResult
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import StreamedReply, WholeReply

_NOT_STORED = "path: responses are not stored; allowed: POST /v1/responses"


class Responses:
    """The routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> HttpResponse:
        """Raises Problem, Refusal, InflightError."""
        gateway = self._gateway
        fields = await gateway.read_fields(request, ResponsesRequest, parse)
        fields.check()
        served = await gateway.find(request, fields.model)
        conversation = fields.to_conversation(served.description)
        max_tokens = -1 if fields.max_output_tokens is None else fields.max_output_tokens
        num_logprobs = fields.num_logprobs
        call, plan = conversation.call(served, fields.options(), max_tokens, NAMING)
        if num_logprobs is not None:
            call.tensors["num_logprobs"] = num_logprobs
        stream = await gateway.generate(request, served, [call])
        response = Response(fields, served.id, plan)
        if fields.stream:
            return StreamedReply(stream, ResponseEvents(response), gateway.busy_poll)
        return WholeReply(stream, ResponseResult(response), gateway.busy_poll)

    async def stored(self, request: Request) -> HttpResponse:
        """Raises Problem, always."""
        raise Problem(_NOT_STORED, 404)
