"""The server-sent events of a streamed response, made from parts that do not change."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from inflight.door.gateway.generation import Delta
from inflight.door.gateway.usage import Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Identity:
    """What all chunks of a response have in common.

    Args:
        prefix: of the id.
        kind: `object` of OpenAI's API.
        model: the id of the model.
    """

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self.members = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    @property
    def head(self) -> bytes:
        """Of an event, up to its choices."""
        return b"data: " + _encode(self.members)[:-1] + b',"choices":['


def usage_of(usage: Usage, num_reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's object of a usage."""
    found: dict[str, Any] = {
        "prompt_tokens": usage.num_input_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return found


class UsageChunks:
    """The usage in the chunks of a stream.

    Args:
        is_included: the last chunk has it.
        is_continuous: all chunks have it.
    """

    def __init__(self, num_outputs: int, is_included: bool, is_continuous: bool) -> None:
        self.usage = Usage(num_outputs)
        self._is_included = is_included
        self._is_continuous = is_continuous
        self.closing = b'],"usage":null}\n\n' if is_included else b"]}\n\n"
        """The end of an event, after its choices."""

    def begin(self, first: Delta) -> None:
        """Count the prompt."""
        self._add(msgspec.structs.replace(first, num_output_tokens=0))

    def add(self, delta: Delta) -> None:
        """Count a delta, before its chunks."""
        if self._is_included:
            self._add(delta)

    def _add(self, delta: Delta) -> None:
        self.usage.add([delta])
        if self._is_continuous:
            self.closing = b'],"usage":' + _encode(usage_of(self.usage)) + b"}\n\n"

    def last(self, identity: Identity, num_reasoning_tokens: int | None = None) -> bytes:
        """The last chunk, if there is one for the usage."""
        if not self._is_included:
            return b""
        usage = usage_of(self.usage, num_reasoning_tokens)
        return b'%s],"usage":%s}\n\n' % (identity.head, _encode(usage))
