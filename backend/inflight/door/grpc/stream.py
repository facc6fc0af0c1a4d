"""ModelStreamInfer: a client's stream and Triton's, relayed message by message."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import Any

import grpc

from inflight.access.accounts_client import Lease
from inflight.door.grpc import checks, messages, renamed, status
from inflight.door.grpc.calls import Call, Calls
from inflight.door.grpc.gate import Gate
from inflight.door.grpc.health import Probes
from inflight.door.grpc.status import Code, Refused, Status
from inflight.door.grpc.upstream import Upstream, passed_on
from inflight.door.http.refusal import RETRY_AFTER_S
from inflight.door.limits import Limits
from inflight.door.versions import resolve
from inflight.errors import InflightError
from inflight.ipc.sockets.disconnects import TICKET, DisconnectReporter, new_ticket

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_IN_FLIGHT = 1024
# The entry of a last response's parameters; the texts of a response may contain it, too.
FINAL = b"triton_final_response\x12\x02\x08\x01"
# The first byte of a ModelStreamInferResponse with an error_message.
ERROR_TAG = b"\x0a"

logger = logging.getLogger(__name__)


class InFlight:
    """The requests of a stream that have not had their last response.

    Triton marks the last response of a request. It sends an empty last response only if the request
    enables that. The door always enables it, and drops the response unless its client did, too.

    Attributes:
        ticket: of all of them.
    """

    def __init__(self) -> None:
        self.ticket = new_ticket()
        self._wants_final: dict[str, deque[bool]] = {}
        self._count = 0
        self._leases: list[Lease] = []

    def __len__(self) -> int:
        return self._count

    def begin(self, request: Any, lease: Lease | None) -> None:
        """Count a request, enable its empty last response, and give it the ticket."""
        request.parameters[TICKET].string_param = self.ticket
        if lease is not None:
            self._leases.append(lease)
        is_set = checks.EMPTY_FINAL in request.parameters
        wants = is_set and request.parameters[checks.EMPTY_FINAL].bool_param
        request.parameters[checks.EMPTY_FINAL].bool_param = True
        self._wants_final.setdefault(request.id, deque()).append(wants)
        self._count += 1

    def wants_final(self, request_id: str) -> bool:
        """Whether the client enabled the empty last response of this request."""
        waiting = self._wants_final.get(request_id)
        return waiting[0] if waiting else True

    def end(self, request_id: str) -> None:
        """Count the end of a request."""
        waiting = self._wants_final.get(request_id)
        if not waiting:
            return
        self._count -= 1
        if self._leases:  # one is like another: they are of one key
            self._leases.pop().end()
        waiting.popleft()
        if not waiting:
            del self._wants_final[request_id]

    def end_all(self) -> None:
        """The stream is over, and with it its requests."""
        while self._leases:
            self._leases.pop().end()


class Stream:
    """One call of ModelStreamInfer."""

    def __init__(
        self,
        call: Call,
        calls: Calls,
        probes: Probes,
        upstream: Upstream,
        limits: Limits,
        gate: Gate,
        disconnects: DisconnectReporter,
    ) -> None:
        self._call = call
        self._gate = gate
        self._calls = calls
        self._probes = probes
        self._upstream = upstream
        self._limits = limits
        self._disconnects = disconnects
        self._in_flight = InFlight()
        self._is_half_closed = False
        self._has_versions = False  # among its requests
        metadata = call.context.invocation_metadata()
        self._metadata = passed_on(metadata, call.request_id)
        self._ends_on_error = ("triton_grpc_error", "true") in self._metadata

    async def run(self) -> None:
        """Relay until either side ends its stream.

        Triton's stream begins with the first request that passes: an idle one costs it nothing.
        """
        try:
            first = await self._next()
            if first is not None:
                await self._relay(first)
        finally:
            if self._in_flight:
                self._disconnects.report(self._in_flight.ticket)
            self._in_flight.end_all()

    async def _relay(self, first: bytes) -> None:
        triton = self._upstream.stream(METHOD, self._call.context.time_remaining(), self._metadata)
        sender = asyncio.create_task(self._send(triton, first))
        sender.add_done_callback(self._sender_ended)
        try:
            await self._receive(triton)
        finally:
            sender.cancel()
            triton.cancel()

    async def _next(self) -> bytes | None:
        """The next valid request, as it is sent to Triton; None at the end of the stream."""
        call = self._call
        while True:
            if not self._in_flight:
                self._calls.became_idle(call)
            data = await call.read()
            if data is None:
                return None
            call.idle_since = math.inf
            try:
                if len(self._in_flight) >= MAX_IN_FLIGHT:
                    raise Refused(
                        Code.RESOURCE_EXHAUSTED,
                        f"request: the stream has {MAX_IN_FLIGHT} in flight; allowed: "
                        f"{MAX_IN_FLIGHT}",
                        RETRY_AFTER_S,
                    )
                request = checks.infer_request(data, self._limits)
                if call.span is not None:
                    call.span.requested(request.model_name)
                self._probes.check_ready()
                lease = await self._gate.begin(call, request, METHOD)
                self._find_version(request, lease)
            except InflightError as error:
                await self._refuse(status.of(error), _id_of(data))
                continue
            self._in_flight.begin(request, lease)
            return checks.written(request)

    def _find_version(self, request: Any, lease: Lease | None) -> None:
        """Name the model as in Triton. Raises UnknownModel: the version is not loaded."""
        try:
            found = self._probes.current()
            name = resolve(found, request.model_name, request.model_version)
        except InflightError:
            if lease is not None:
                lease.end()
            raise
        self._has_versions |= name != request.model_name
        request.model_name = name

    async def _refuse(self, why: Status, request_id: str) -> None:
        """Respond to a refused request in the form of Triton's errors."""
        if self._ends_on_error:
            self._call.end(why)
            await asyncio.get_running_loop().create_future()  # until it cancels this task, too
        response = messages.StreamResponse(error_message=why.text)
        response.infer_response.id = request_id
        await self._call.write(response.SerializeToString())

    async def _send(self, triton: Any, first: bytes) -> None:
        """The client's requests to Triton."""
        data: bytes | None = first
        while data is not None:
            if math.isinf(self._call.waiting_since):
                self._call.waiting_since = time.monotonic()
            await triton.write(data)
            data = await self._next()
        self._is_half_closed = True
        self._call.idle_since = math.inf
        await triton.done_writing()

    def _sender_ended(self, sender: asyncio.Task[None]) -> None:
        if sender.cancelled() or (error := sender.exception()) is None:
            return
        # What ends Triton's stream is reported by `_receive`, and what ends the client's by gRPC.
        if not isinstance(error, grpc.RpcError | asyncio.InvalidStateError | grpc.aio.BaseError):
            logger.error("call %s failed", self._call.request_id, exc_info=error)
            self._call.end(status.of(Exception()))

    async def _receive(self, triton: Any) -> None:
        """Triton's responses to the client, up to the end of Triton's stream."""
        call = self._call
        while (data := await triton.read()) is not grpc.aio.EOF:
            call.waiting_since = time.monotonic()
            if self._has_versions:
                data = renamed.stream_response(data)
            may_be_last = data[:1] == ERROR_TAG or FINAL in data
            passed, ended = self._last(data) if may_be_last else (data, None)
            if passed is not None:
                await call.write(passed)
            if ended is None:
                continue
            # Not before the write: while the server drains, a call without requests is ended.
            self._in_flight.end(ended)
            if not self._in_flight:
                call.waiting_since = math.inf
                if not self._is_half_closed:  # otherwise Triton ends it now
                    self._calls.became_idle(call)
        if not self._is_half_closed:
            raise Refused(Code.UNAVAILABLE, status.LOST)

    def _last(self, data: bytes) -> tuple[bytes | None, str | None]:
        """What to relay of a response that may be its request's last, and the id of the request if
        it is."""
        response = messages.StreamResponse.FromString(data)
        answer = response.infer_response
        has_mark = "triton_final_response" in answer.parameters
        is_final = has_mark and answer.parameters["triton_final_response"].bool_param
        if response.error_message:
            ends = is_final or not has_mark
            return _cleaned(response, data), answer.id if ends else None
        if not is_final:
            return data, None
        is_wanted = answer.outputs or self._in_flight.wants_final(answer.id)
        return data if is_wanted else None, answer.id


def _cleaned(response: Any, data: bytes) -> bytes:
    text = status.clean(response.error_message)
    if text == response.error_message:
        return data
    response.error_message = text
    cleaned: bytes = response.SerializeToString()
    return cleaned


def _id_of(data: bytes) -> str:
    """The id of a refused request, if it can be read."""
    try:
        found: str = checks.parse(messages.RequestId, data).id
    except InflightError:
        return ""
    return found if len(found) <= checks.MAX_ID else ""
