"""A Triton server behind the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from inflight.door.gateway.problem import Problem, of_refusal, of_triton
from inflight.door.http.refusal import unavailable
from inflight.door.http.upstream import Exchange, Upstream, UpstreamLost
from inflight.door.versions import resolve
from inflight.ipc.health import Health
from inflight.ipc.sockets.disconnects import TICKET, DisconnectReporter, new_ticket

INFER_TIMEOUT_S = 30.0
_JSON = {"Content-Type": "application/json"}
_KEYS = ("authorization", "x-api-key")
_NO_ANSWER = "the server closed the connection before it responded; retry later"


class HealthSource(Protocol):
    """What is known of a server."""

    def read(self) -> Health: ...


class Triton:
    """Requests to one server.

    Args:
        upstream: its HTTP port, or that of the door in front of it.
        health: whether it is ready, and its models.
        runtime_folder: of a supervised server, whose fronts learn there which clients have left;
            None for a server that notices it by the connection. Such a server also checks keys
            itself: it gets those of the clients.
        api_key: for requests that are not a client's.

    Attributes:
        num_in_flight: generations.
    """

    def __init__(
        self,
        upstream: Upstream,
        health: HealthSource,
        runtime_folder: Path | None = None,
        api_key: str = "",
    ) -> None:
        self._headers = _JSON | bearer(api_key)
        self.upstream = upstream
        self.health = health
        self.num_in_flight = 0
        self._disconnects = DisconnectReporter(runtime_folder) if runtime_folder else None

    def path_of(self, model: str) -> str:
        """Of a model, or of a version as NAME@VERSION. Raises UnknownModel."""
        name, _, version = model.partition("@")
        return f"/v2/models/{resolve(self.health.read(), name, version)}"

    def own_parameters(self) -> dict[str, str]:
        """Request parameters by which the server identifies a request."""
        return {TICKET: new_ticket()} if self._disconnects is not None else {}

    def headers_for(self, client: Mapping[str, str]) -> dict[str, str]:
        """The headers of a client's request, from its own."""
        if self._disconnects is not None:
            return _JSON
        keys = {name: client[name] for name in _KEYS if name in client and client[name].isascii()}
        return _JSON | keys

    def abandon(self, own: Mapping[str, str]) -> None:
        """Cancel a request by its own parameters: its client has left."""
        if self._disconnects is not None:
            self._disconnects.report(own[TICKET])

    async def connect(self) -> Exchange:
        """Raises Problem."""
        try:
            return await self.upstream.connect()
        except UpstreamLost:
            raise self.lost() from None

    def lost(self) -> Problem:
        return of_refusal(unavailable(self.health.read().reason or _NO_ANSWER))

    async def infer(
        self, model: str, inputs: list[dict[str, Any]], outputs: list[str], fields: dict[str, str]
    ) -> dict[str, list[Any]]:
        """The values of outputs of a model with a single response, by name.

        Args:
            inputs: tensors in KServe's JSON.
            fields: the client's name of each tensor.

        Raises:
            Problem: the server refuses the request or does not answer.
        """
        request = {"inputs": inputs, "outputs": [{"name": name} for name in outputs]}
        path = f"{self.path_of(model)}/infer"
        exchange = await self.connect()
        try:
            async with asyncio.timeout(INFER_TIMEOUT_S):
                await exchange.send("POST", path, self._headers, msgspec.json.encode(request))
                body = await exchange.read_all()
        except UpstreamLost:
            raise self.lost() from None
        except TimeoutError:
            raise Problem("the server did not respond in time; retry later", 504) from None
        finally:
            exchange.finish()
        if exchange.status != 200:
            raise of_triton(exchange.status, body, fields)
        try:
            found = msgspec.json.decode(body, type=_Inferred)
        except msgspec.DecodeError:
            raise self.lost() from None
        return {one.name: one.data for one in found.outputs}


class _Output(msgspec.Struct):
    name: str
    data: list[Any]


class _Inferred(msgspec.Struct):
    outputs: list[_Output]


def bearer(api_key: str) -> dict[str, str]:
    """The header with a key; empty without one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def strings(name: str, *values: str) -> dict[str, Any]:
    """An input tensor."""
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def flag(name: str, value: bool) -> dict[str, Any]:
    """An input tensor."""
    return {"name": name, "shape": [1], "datatype": "BOOL", "data": [value]}


def integers(name: str, values: list[int]) -> dict[str, Any]:
    """An input tensor of INT32."""
    return {"name": name, "shape": [len(values)], "datatype": "INT32", "data": values}
