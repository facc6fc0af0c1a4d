"""GET /v1/models and /v1/models/{id}; POST /v1/models/{id}/load and /unload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.directory import ServedModel
from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import json_response
from inflight.door.http.gate import visit_of
from inflight.errors import ConfigError
from inflight.ipc import control
from inflight.ipc.control import LoadModel, Models, UnloadModel

_OWNER = "inflight"
_NO_CONTROL = (
    "path: models are not loaded and unloaded here; allowed: with --model-control, --keys and an "
    "admin's key"
)
_BUSY = "the server has too many threads; retry later"


class ModelRoutes:
    """The routes; a key sees the models that it allows, and an admin's can load and unload them.

    Args:
        control_socket: of the supervisor; None if there is none.
    """

    def __init__(self, gateway: Gateway, control_socket: Path | None = None) -> None:
        self._gateway = gateway
        self._control_socket = control_socket

    async def index(self, request: Request) -> Response:
        """Raises Problem."""
        data = [_entry(one) for one in await self._gateway.models(request)]
        return json_response({"object": "list", "data": data})

    async def find(self, request: Request) -> Response:
        """Raises Problem."""
        found = await self._gateway.find(request, request.path_params["model"])
        return json_response(_entry(found))

    async def load(self, request: Request) -> Response:
        """Raises Problem, InflightError."""
        return await self._control(request, LoadModel(self._name(request)))

    async def unload(self, request: Request) -> Response:
        """Raises Problem, InflightError."""
        return await self._control(request, UnloadModel(self._name(request)))

    def _name(self, request: Request) -> str:
        return control.check_name(request.path_params["model"])

    async def _control(self, request: Request, change: LoadModel | UnloadModel) -> Response:
        visit = visit_of(request)
        path = self._control_socket
        if visit is None or path is None or not path.exists():
            raise Problem(_NO_CONTROL, 404)
        visit.check_admin()
        try:
            found: Models = await asyncio.to_thread(control.call, path, change)
        except ConfigError as error:  # of the model's settings or repository
            raise Problem(str(error), param="model") from None
        except RuntimeError:  # no further thread can be started
            raise Problem(_BUSY, 503) from None
        states = [{"id": one.name, "state": one.state} for one in found.models]
        return json_response({"models": states})


def _entry(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": _OWNER,
        "root": model.id,
        "parent": None,
        "max_model_len": model.description.max_model_len,
    }
