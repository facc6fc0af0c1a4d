"""Whose call it is, and what its key allows."""

from __future__ import annotations

from typing import Any

from inflight.access.accounts_client import Lease
from inflight.access.admission import Admission
from inflight.door.grpc import checks
from inflight.door.grpc.calls import Call
from inflight.door.grpc.health import SERVICE
from inflight.door.grpc.status import Code, Refused
from inflight.ipc.metrics.usage import ACCOUNT

HEALTH = "grpc.health.v1.Health"
PROBES = frozenset(
    {
        f"/{SERVICE}/ServerLive",
        f"/{SERVICE}/ServerReady",
        f"/{HEALTH}/Check",
        f"/{HEALTH}/Watch",
    }
)


class Gate:
    """Calls other than probes need a key.

    Args:
        admission: None if the server has no keys; then no call needs one.
    """

    def __init__(self, admission: Admission | None) -> None:
        self._admission = admission

    def enter(self, call: Call, method: str) -> None:
        """Identify a call's client, before its first message is read.

        Raises:
            Unauthenticated: no valid key.
        """
        if self._admission is not None and method not in PROBES:
            metadata = call.context.invocation_metadata() or ()
            call.key = self._admission.identify(metadata, peer=call.context.peer(), what=method)

    async def begin(self, call: Call, request: Any, method: str) -> Lease | None:
        """Admit an inference request, and name its account to the model.

        Args:
            request: a ModelInferRequest that has been checked.

        Raises:
            InflightError: the key does not allow it, or not now.
        """
        if self._admission is None or call.key is None:
            return None
        self.enter(call, method)  # on a stream, the key may have been revoked since it began
        peer = call.context.peer()
        lease = await self._admission.begin(call.key, request.model_name, peer=peer, what=method)
        request.parameters[ACCOUNT].string_param = call.key.account
        return lease


def check_model(call: Call, data: bytes) -> None:
    """Whether the key of a call allows the model that a request is about.

    Args:
        data: a request about a model, checked. Without a name, it is about all models.

    Raises:
        UnknownModel, Refused: it does not.
    """
    if call.key is None or not call.key.models:
        return
    name = checks.model_of(data)
    if not name:
        allowed = ", ".join(call.key.models)
        raise Refused(Code.INVALID_ARGUMENT, f"name: is missing; allowed: {allowed}")
    call.key.check_model(name)
