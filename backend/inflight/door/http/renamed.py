"""Triton's responses about a version of a model, under the model's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inflight.core.model_version import public_name
from inflight.door.versions import without_versions

_EVENT_END = b"\n\n"
_ERROR = b'data: {"error":'


class Renamed:
    """Gives responses the model's name in place of Triton's. In inference responses, only the
    member `model_name` of the JSON text matches: quotation marks within strings are escaped.

    Args:
        name: of the model in Triton.
        versions: of the model that are loaded; empty if it has not several.
    """

    def __init__(self, name: str, versions: Sequence[int] = ()) -> None:
        self._versions = versions
        self._found = f'"model_name":"{name}"'.encode()
        self._replacement = f'"model_name":"{public_name(name)}"'.encode()
        self._rest = b""

    def description(self, body: bytes) -> bytes:
        """Metadata, configuration or statistics."""
        try:
            answer: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError:  # readiness has no body
            return body
        for one in (answer, *answer.get("model_stats", ())):
            if "name" in one:
                one["name"] = public_name(one["name"])
        if "versions" in answer and self._versions:
            answer["versions"] = [str(version) for version in self._versions]
        return msgspec.json.encode(answer)

    def inference(self, body: bytes) -> bytes:
        """A whole response, which may have binary tensors behind the JSON text."""
        return body.replace(self._found, self._replacement, 1)

    def events(self, part: bytes) -> bytes:
        """The server-sent events that are complete with this part of the stream."""
        data = self._rest + part
        end = data.rfind(_EVENT_END) + len(_EVENT_END)
        if end < len(_EVENT_END):
            self._rest = data
            return b""
        self._rest = data[end:]
        found = data[:end].replace(self._found, self._replacement)
        return _with_clean_errors(found) if _ERROR in found else found

    def rest(self) -> bytes:
        """What has arrived of an event that was cut off."""
        rest, self._rest = self._rest, b""
        return rest


def _with_clean_errors(events: bytes) -> bytes:
    parts = events.split(_EVENT_END)
    return _EVENT_END.join(
        without_versions(part.decode()).encode() if part.startswith(_ERROR) else part
        for part in parts
    )
