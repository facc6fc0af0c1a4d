"""What a server says about itself: whether it is live and ready, and its models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from inflight_client.calls.flow import Flow, Query
from inflight_client.errors import InvalidRequest

# Timeout of these calls if the client has none.
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a server.

    Attributes:
        name: as requests name it.
        versions: those that are loaded.
        is_ready: whether one is.
    """

    name: str
    versions: tuple[int, ...]
    is_ready: bool


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output of a model.

    Attributes:
        name: as requests name it.
        datatype: KServe's name, such as INT32 or BYTES.
        shape: -1 for a dimension of any size.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's interface.

    Attributes:
        name: of the model.
        versions: those that are loaded.
        platform: `ensemble`, or the name of the backend.
        inputs: in the order of config.pbtxt.
        outputs: likewise.
    """

    name: str
    versions: tuple[int, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def is_live(timeout: float | None) -> Flow[bool]:
    answer = yield Query("ServerLive", service_pb2.ServerLiveRequest(), timeout or _TIMEOUT_S)
    return bool(answer.live)


def is_ready(timeout: float | None) -> Flow[bool]:
    answer = yield Query("ServerReady", service_pb2.ServerReadyRequest(), timeout or _TIMEOUT_S)
    return bool(answer.ready)


def is_model_ready(name: str, version: str, timeout: float | None) -> Flow[bool]:
    request = service_pb2.ModelReadyRequest(name=name, version=version)
    answer = yield Query("ModelReady", request, timeout or _TIMEOUT_S)
    return bool(answer.ready)


def metadata(name: str, version: str, timeout: float | None) -> Flow[ModelMetadata]:
    request = service_pb2.ModelMetadataRequest(name=name, version=version)
    found = yield Query("ModelMetadata", request, timeout or _TIMEOUT_S)
    return ModelMetadata(
        found.name,
        tuple(sorted(int(one) for one in found.versions)),
        found.platform,
        tuple(_tensor(one) for one in found.inputs),
        tuple(_tensor(one) for one in found.outputs),
    )


def models(known: Iterable[str], timeout: float | None) -> Flow[list[Model]]:
    """The models of a server, by name.

    Args:
        known: the names to look for on a server that closes its index; only those that are ready
            are found there.
        timeout: seconds for each call.
    """
    try:
        request = service_pb2.RepositoryIndexRequest()
        index = yield Query("RepositoryIndex", request, timeout or _TIMEOUT_S)
    except InvalidRequest:
        return (yield from _probed(known, timeout))
    versions: dict[str, list[int]] = {}
    for one in index.models:
        loaded = versions.setdefault(one.name, [])
        if one.state == "READY":
            loaded.append(int(one.version or 1))
    return [Model(name, tuple(sorted(of)), bool(of)) for name, of in sorted(versions.items())]


def _probed(known: Iterable[str], timeout: float | None) -> Flow[list[Model]]:
    found = []
    for name in sorted(known):
        if (yield from is_model_ready(name, "", timeout)):
            about = yield from metadata(name, "", timeout)
            found.append(Model(name, about.versions, True))
    return found


def _tensor(one: Any) -> TensorMetadata:
    return TensorMetadata(one.name, one.datatype, tuple(one.shape))
