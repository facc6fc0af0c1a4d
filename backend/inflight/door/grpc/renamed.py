"""Triton's responses about versions of models, under the models' names.

The fields that a message does not declare stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inflight.core.model_version import public_name
from inflight.door.grpc import checks, messages
from inflight.door.versions import resolve
from inflight.ipc.health import Health

Versions = Mapping[str, list[int]]


def name_request(health: Health, data: bytes) -> bytes:
    """A request about a model, which has been checked, with the model's name in Triton.

    Raises:
        UnknownModel: the version is not loaded.
    """
    request = checks.parse(messages.NameRequest, data)
    name = resolve(health, request.name, request.version)
    if name == request.name:
        return data
    request.name = name
    return checks.written(request)


def stream_response(data: bytes) -> bytes:
    """A message of ModelStreamInfer."""
    response = messages.NamedStreamResponse.FromString(data)
    if response.HasField("infer_response"):
        _rename_inference(response.infer_response)
    return _bytes(response)


def unary_response(method: str, data: bytes, versions: Versions) -> bytes:
    """The response of a method that runs or describes models; of any other one, as it is.

    Args:
        versions: of the models that have several.
    """
    if method not in _RENAMED or not versions:
        return data
    kind, rename = _RENAMED[method]
    response = kind.FromString(data)
    rename(response, versions)
    return _bytes(response)


def _rename_inference(response: Any, versions: Versions | None = None) -> None:
    response.model_name = public_name(response.model_name)


def _rename_metadata(response: Any, versions: Versions) -> None:
    response.name = public_name(response.name)
    if response.name in versions:
        response.versions[:] = map(str, versions[response.name])


def _rename_config(response: Any, versions: Versions) -> None:
    response.config.name = public_name(response.config.name)


def _rename_statistics(response: Any, versions: Versions) -> None:
    for one in response.model_stats:
        one.name = public_name(one.name)


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


_RENAMED: dict[str, tuple[Any, Callable[[Any, Versions], None]]] = {
    "ModelInfer": (messages.NamedResponse, _rename_inference),
    "ModelMetadata": (messages.ModelMetadata, _rename_metadata),
    "ModelConfig": (messages.ModelConfig, _rename_config),
    "ModelStatistics": (messages.ModelStatistics, _rename_statistics),
}
