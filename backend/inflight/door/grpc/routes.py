"""The methods that the door serves; all others are closed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from inflight.door.grpc import checks, renamed
from inflight.door.grpc.calls import Call, Calls
from inflight.door.grpc.gate import HEALTH, Gate, check_model
from inflight.door.grpc.health import SERVICE, Probes, not_ready_model
from inflight.door.grpc.status import Code, Refused
from inflight.door.grpc.stream import Stream
from inflight.door.grpc.upstream import Upstream, passed_on
from inflight.door.limits import Limits
from inflight.door.tracing import Tracing
from inflight.door.versions import resolve
from inflight.ipc.sockets.disconnects import TICKET, DisconnectReporter, new_ticket

CLOSED = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)
# Methods that Triton answers, and what is checked before.
PASSED: dict[str, Callable[[bytes], bytes]] = {
    "ServerMetadata": checks.empty_request,
    "ModelMetadata": checks.model_request,
    "ModelConfig": checks.model_request,
    "ModelStatistics": checks.statistics_request,
}
_INFERENCE = frozenset({f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"})
# Not counted: they would outnumber the requests.
_PROBES = frozenset(
    {
        f"/{SERVICE}/ServerLive",
        f"/{SERVICE}/ServerReady",
        f"/{HEALTH}/Check",
        f"/{HEALTH}/Watch",
    }
)

ABOUT_MODELS = frozenset({"ModelMetadata", "ModelConfig", "ModelStatistics"})

Unary = Callable[[Call, bytes], Awaitable[bytes]]
Work = Callable[[Call], Awaitable[None]]


class Routes(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call.

    To gRPC all of them are streams of bytes, so that each read and each write can be timed.
    """

    def __init__(
        self,
        calls: Calls,
        probes: Probes,
        upstream: Upstream,
        limits: Limits,
        gate: Gate,
        disconnects: DisconnectReporter,
        tracing: Tracing | None = None,
    ) -> None:
        self._calls = calls
        self._gate = gate
        self._disconnects = disconnects
        self._probes = probes
        self._upstream = upstream
        self._limits = limits
        self._tracing = tracing
        works: dict[str, Work] = {
            f"/{SERVICE}/ServerLive": self._unary(probes.server_live),
            f"/{SERVICE}/ServerReady": self._unary(probes.server_ready),
            f"/{SERVICE}/RepositoryIndex": self._unary(probes.index),
            f"/{SERVICE}/ModelReady": self._unary(self._model_ready),
            f"/{SERVICE}/ModelInfer": self._unary(self._infer),
            f"/{SERVICE}/ModelStreamInfer": self._stream,
            f"/{HEALTH}/Check": self._unary(probes.check),
            f"/{HEALTH}/Watch": probes.watch,
        }
        for name, check in PASSED.items():
            works[f"/{SERVICE}/{name}"] = self._unary(self._pass(name, check))
        for name in CLOSED:
            works[f"/{SERVICE}/{name}"] = _refuse(name)
        self._handlers = {method: self._handler(method, work) for method, work in works.items()}
        self._unknown = self._handler("", _refuse_unknown)

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _handler(self, method: str, work: Work) -> Any:
        async def admitted(call: Call) -> None:
            if self._tracing is not None and method in _INFERENCE:
                metadata = call.context.invocation_metadata()
                call.span = self._tracing.begin(metadata, call.request_id)
            self._gate.enter(call, method)
            await work(call)

        async def handle(_: Any, context: Any) -> None:
            await self._calls.run(context, admitted, is_counted=method not in _PROBES)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _unary(self, answer: Unary) -> Work:
        """One request, one response."""

        async def work(call: Call) -> None:
            call.reading_since = time.monotonic()
            data = await call.read()
            call.reading_since = float("inf")
            if data is None:
                raise Refused(Code.INVALID_ARGUMENT, "request: is missing; allowed: one message")
            await call.answer(await answer(call, data))

        return work

    def _pass(self, name: str, check: Callable[[bytes], bytes]) -> Unary:
        async def answer(call: Call, data: bytes) -> bytes:
            checked = check(data)
            if name in ABOUT_MODELS:
                check_model(call, checked)
            self._probes.check_ready()
            if name in ABOUT_MODELS:
                checked = renamed.name_request(self._probes.current(), checked)
            return await self._ask(call, name, checked)

        return answer

    async def _model_ready(self, call: Call, data: bytes) -> bytes:
        checked = checks.model_request(data)
        check_model(call, checked)
        if not self._probes.is_ready():
            return not_ready_model()
        checked = renamed.name_request(self._probes.current(), checked)
        return await self._ask(call, "ModelReady", checked)

    async def _infer(self, call: Call, data: bytes) -> bytes:
        request = checks.infer_request(data, self._limits)
        if call.span is not None:
            call.span.requested(request.model_name)
        self._probes.check_ready()
        lease = await self._gate.begin(call, request, f"/{SERVICE}/ModelInfer")
        ticket = request.parameters[TICKET].string_param = new_ticket()
        is_complete = False
        try:
            found = self._probes.current()
            request.model_name = resolve(found, request.model_name, request.model_version)
            response = await self._ask(call, "ModelInfer", checks.written(request))
            is_complete = True
            return response
        finally:
            if not is_complete:
                self._disconnects.report(ticket)
            if lease is not None:
                lease.end()

    async def _stream(self, call: Call) -> None:
        with self._calls.open_stream(call):
            await Stream(
                call,
                self._calls,
                self._probes,
                self._upstream,
                self._limits,
                self._gate,
                self._disconnects,
            ).run()

    async def _ask(self, call: Call, name: str, data: bytes) -> bytes:
        """Triton's response, within the client's deadline and the server's."""
        limit = self._limits.first_byte_timeout_s
        remaining = call.context.time_remaining()
        timeout = limit if remaining is None else min(remaining, limit)
        metadata = passed_on(call.context.invocation_metadata(), call.request_id)
        response = await self._upstream.unary(f"/{SERVICE}/{name}", data, timeout, metadata)
        return renamed.unary_response(name, response, self._probes.current().versions)


def _refuse(name: str) -> Work:
    async def work(call: Call) -> None:
        raise Refused(
            Code.PERMISSION_DENIED,
            f"{name}: is closed; allowed: inference, metadata, statistics and health",
        )

    return work


async def _refuse_unknown(call: Call) -> None:
    raise Refused(Code.UNIMPLEMENTED, f"the method is unknown; allowed: those of {SERVICE}")
