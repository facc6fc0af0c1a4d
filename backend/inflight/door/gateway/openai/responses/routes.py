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
        asked = await gateway.read_fields(request, ResponsesRequest, parse)
        asked.check()
        served = await gateway.find(request, asked.model)
        conversation = asked.asked(served.description)
        max_tokens = -1 if asked.max_output_tokens is None else asked.max_output_tokens
        num_logprobs = asked.num_logprobs
        call, plan = conversation.call(served, asked.options(), max_tokens, NAMING)
        if num_logprobs is not None:
            call.tensors["num_logprobs"] = num_logprobs
        stream = await gateway.generate(request, served, [call])
        response = Response(asked, served.id, plan)
        if asked.stream:
            return StreamedReply(stream, ResponseEvents(response), gateway.busy_poll)
        return WholeReply(stream, ResponseResult(response), gateway.busy_poll)

    async def stored(self, request: Request) -> HttpResponse:
        """Raises Problem, always."""
        raise Problem(_NOT_STORED, 404)
