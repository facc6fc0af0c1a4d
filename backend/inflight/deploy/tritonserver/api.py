"""Triton's HTTP API, as far as its supervisor uses it: readiness, and loading of models."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from inflight.deploy.tritonserver.command import ADMIN_HEADER
from inflight.deploy.tritonserver.failures import load_failures
from inflight.errors import EngineError

# Of Triton's answers; a load or unload answers when it is done.
ASK_S = 5.0
CONTROL_S = 300.0
_POLL_S = 0.1
_UNLOADED = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class TritonApi:
    """The API of one tritonserver.

    Attributes:
        host, port: of HTTP.
        admin_key: see `ADMIN_HEADER`.
    """

    host: str
    port: int
    admin_key: str

    def probe(self) -> int:
        """The status of tritonserver's own readiness; 0 if it does not answer."""
        status, _ = self._ask("GET", "/v2/health/ready")
        return status

    def models(self) -> list[str]:
        """Names of the models that are ready."""
        return sorted(self._index(b'{"ready": true}'))

    def load_model(self, name: str, config: str | None = None) -> None:
        """Load a model; returns once it is ready.

        Args:
            config: in place of its config.pbtxt, as JSON; a loaded model is replaced if it differs.

        Raises:
            EngineError: it cannot be loaded, with Triton's reason. One that was loaded before still
                is.
        """
        parameters = {"parameters": {"config": config}} if config is not None else {}
        self._control(f"{name}/load", msgspec.json.encode(parameters))

    def unload_models(self, names: Sequence[str], timeout_s: float) -> None:
        """Unload models; returns once their requests and their stubs have ended.

        Triton takes a second to end a stub, so they end side by side.

        Args:
            names: in an order in which no model is needed by a later one.

        Raises:
            EngineError: Triton refuses, or it takes too long. The others are unloaded.
        """
        problems, waiting = [], []
        for name in names:
            try:
                self._control(f"{name}/unload", b"{}")
                waiting.append(name)
            except EngineError as error:
                problems.append(f"model {name}: {error}")
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() <= deadline:
            states = self._index(b"{}")
            waiting = [one for one in waiting if states.get(one, _UNLOADED) != _UNLOADED]
            time.sleep(_POLL_S if waiting else 0.0)
        problems += [f"model {name} was not unloaded within {timeout_s:g} s" for name in waiting]
        if problems:
            raise EngineError("; ".join(problems))

    def _index(self, body: bytes) -> dict[str, str]:
        """States of Triton's models, by name; empty if it does not answer."""
        status, answer = self._ask("POST", "/v2/repository/index", body)
        if status != 200:
            return {}
        return {one["name"]: one.get("state", "") for one in msgspec.json.decode(answer)}

    def _control(self, path: str, body: bytes) -> None:
        status, answer = self._ask("POST", f"/v2/repository/models/{path}", body, CONTROL_S)
        if status == 200:
            return
        if not status:
            raise EngineError("tritonserver did not answer; see its log")
        text = str(msgspec.json.decode(answer).get("error", ""))
        reasons = load_failures(text)
        raise EngineError("; ".join(reasons) or text)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = ASK_S
    ) -> tuple[int, bytes]:
        """Status and body of an answer; 0 if there is none."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {ADMIN_HEADER: self.admin_key})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()
