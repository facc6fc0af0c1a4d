"""The body of a generate request: a flat JSON object, whose keys are inputs or parameters.

Triton turns numbers that an input's datatype cannot hold into others, such as 2**40 into the INT32
0, so values are checked against the model's own declaration of its inputs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from inflight.door.http.refusal import Refusal, from_triton, unavailable
from inflight.door.http.upstream import Upstream, UpstreamLost
from inflight.door.http.values import (
    DATATYPES,
    NOTHING,
    Datatype,
    check_elements,
    check_parameters,
    parse,
    title,
)
from inflight.door.limits import Limits

# After a restart Triton may serve other models.
TTL_S = 5.0
MAX_MODELS = 256
CONFIG_TIMEOUT_S = 10.0


class _Input(msgspec.Struct):
    name: str
    data_type: str


class _Config(msgspec.Struct):
    input: list[_Input] = []


class Models:
    """The inputs that models declare, remembered for `TTL_S`."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[str, tuple[float, dict[str, Datatype]]] = {}

    async def inputs(self, model: str) -> dict[str, Datatype]:
        """Datatypes by name of input.

        Args:
            model: its path, such as /v2/models/generate.

        Raises:
            Refusal: there is no such model, or Triton does not answer.
        """
        at, inputs = self._known.get(model, (-TTL_S, {}))
        if time.monotonic() - at < TTL_S:
            return inputs
        inputs = await self._fetch(model)
        if len(self._known) >= MAX_MODELS:
            self._known.clear()
        self._known[model] = time.monotonic(), inputs
        return inputs

    async def _fetch(self, model: str) -> dict[str, Datatype]:
        try:
            async with asyncio.timeout(CONFIG_TIMEOUT_S):
                status, body = await self._upstream.get(f"{model}/config")
        except (UpstreamLost, TimeoutError):
            raise unavailable("the server is not ready; retry later") from None
        if status != 200:
            raise from_triton(status, body)
        try:
            config = msgspec.json.decode(body, type=_Config)
        except msgspec.DecodeError:
            raise unavailable("the server is not ready; retry later") from None
        return {one.name: _datatype(one.data_type) for one in config.input}


def rebuild(
    body: bytes,
    inputs: dict[str, Datatype],
    limits: Limits,
    own: Mapping[str, str] = NOTHING,
) -> bytes:
    """A checked request, as Triton gets it.

    Args:
        own: request parameters of the door.

    Raises:
        Refusal: with the key at fault.
    """
    request = parse(body, limits.max_json_depth)
    parameters = request.get("parameters", {})
    if type(parameters) is not dict and "parameters" not in inputs:
        raise Refusal(f"parameters: is {title(parameters)}; allowed: an object")
    _check_members("", request, inputs)
    if type(parameters) is dict:
        _check_members("parameters.", parameters, inputs)
    request.update(own)
    return msgspec.json.encode(request)


def _check_members(where: str, members: dict[str, Any], inputs: dict[str, Datatype]) -> None:
    """Check each member as the input, or else as the request parameter, of that name."""
    parameters = {}
    for name, value in members.items():
        datatype = inputs.get(name)
        if datatype is not None:
            _check_input(f"{where}{name}", datatype, value)
        elif where or name != "parameters":
            parameters[name] = value
    check_parameters(where, parameters)


def _check_input(where: str, datatype: Datatype, value: Any) -> None:
    elements = value if type(value) is list else [value]
    if type(value) is dict or any(type(one) is list or type(one) is dict for one in elements):
        raise Refusal(f"{where}: is nested; allowed: a value or an array of values")
    check_elements(where, datatype, elements)


def _datatype(name: str) -> Datatype:
    """By its name in a model's configuration, such as TYPE_INT32."""
    name = name.removeprefix("TYPE_")
    return DATATYPES["BYTES" if name == "STRING" else name]
