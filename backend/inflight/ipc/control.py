"""Model control: the requests of `inflight model` to a running server's supervisor.

One connection per request, over a unix socket in the server's runtime folder that only its user can
open. Messages are JSON, one per line: a request, then any number of `Progress`, then the response.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from inflight.errors import ConfigError, EngineError, RequestError, from_kind
from inflight.ipc.runtime_folder import server_folders

SOCKET = "control.sock"
MAX_MESSAGE = 1 << 20  # bytes
CONNECT_TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}(?:@[0-9]{1,18})?")


class LoadModel(msgspec.Struct, tag="load", frozen=True):
    """Load a model, or replace it if it is loaded.

    Attributes:
        name: of the model with the engine; NAME@VERSION for one of several versions.
        settings: override those of engine.json until the model is loaded again.
    """

    name: str
    settings: dict[str, Any] = {}


class UnloadModel(msgspec.Struct, tag="unload", frozen=True):
    name: str


class ListModels(msgspec.Struct, tag="list", frozen=True):
    pass


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """What is being done; `fraction` of it, in [0, 1], is done."""

    what: str
    fraction: float = 0.0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the repositories.

    Attributes:
        name: of the model with the engine; NAME@VERSION if its policy allows several versions.
        models: names of all models that belong to it.
        state: `unloaded`, `loading`, `ready`, `unloading`; `failed` while its engine restarts.
        version: the version folder that it was loaded from, or is loaded from.
        checkpoint: name of the checkpoint; empty unless it is loaded, as the following.
        device: what it runs on.
        num_blocks: KV blocks of its pool; `num_free_blocks` of them are free.
        num_running: requests that run; `num_waiting` wait for their turn.
    """

    name: str
    models: list[str]
    state: str
    version: str = ""
    checkpoint: str = ""
    device: str = ""
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0


class Models(msgspec.Struct, tag="models", frozen=True):
    """The response: the server by its HTTP address, and all models, or the one that was changed."""

    server: str
    models: list[ModelStatus]


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The response: an error of errors.from_kind(kind, message)."""

    kind: str
    message: str


Request = LoadModel | UnloadModel | ListModels
Response = Models | Failed
_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Progress | Models | Failed)


def check_name(name: str) -> str:
    """The name. Raises RequestError if no model can have it."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise RequestError(
            f"{name[:80]!r} is not a model name; allowed: 1 to 64 letters, digits, '_', '-' and "
            "'.', without '..', and @VERSION"
        )
    return name


def send(sock: socket.socket, message: Request | Progress | Response) -> None:
    """Raises OSError if the peer has disconnected."""
    sock.sendall(msgspec.json.encode(message) + b"\n")


def receive_request(sock: socket.socket) -> Request:
    """Raises RequestError if it is not valid, OSError if none comes in time."""
    try:
        with sock.makefile("rb") as stream:
            found: Request = _requests.decode(stream.readline(MAX_MESSAGE))
    except msgspec.DecodeError as error:
        raise RequestError(f"the message is not valid: {error}") from None
    return found


def call(
    path: Path, request: Request, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Models:
    """The response of a server.

    Args:
        path: of its socket.

    Raises:
        InflightError: it refuses, the request failed, or the server exited.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(str(path))
            sock.settimeout(None)  # a model may load for minutes
            send(sock, request)
            with sock.makefile("rb") as stream:
                for line in stream:
                    reply = _replies.decode(line)
                    if isinstance(reply, Models):
                        return reply
                    if isinstance(reply, Failed):
                        raise from_kind(reply.kind, reply.message)
                    on_progress(reply)
        except OSError as error:
            raise EngineError(f"the server does not answer ({error.strerror})") from None
        except msgspec.DecodeError:
            raise EngineError("the server is of another version; restart it") from None
    raise EngineError("the server exited before it answered")


def find_server(port: int | None = None) -> Path:
    """The control socket of a running server of this user.

    Args:
        port: of its HTTP endpoint; None if there is only one server.

    Raises:
        ConfigError: there is none, or several and no port.
    """
    found: dict[str, Path] = {}
    for folder in server_folders():
        path = folder / SOCKET
        if path.exists():
            try:
                found[call(path, ListModels()).server] = path
            except EngineError:
                continue  # it is exiting
    if port is not None:
        found = {name: path for name, path in found.items() if name.endswith(f":{port}")}
    if not found:
        which = f" on port {port}" if port is not None else ""
        raise ConfigError(
            f"no server{which} accepts model control; start one with `inflight serve "
            "--model-control`"
        )
    if len(found) > 1:
        raise ConfigError(
            f"several servers accept model control: {', '.join(sorted(found))}; choose one with "
            "--port"
        )
    return next(iter(found.values()))
