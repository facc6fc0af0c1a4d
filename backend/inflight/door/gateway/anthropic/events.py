"""The events of a streamed message.

message_start, ping
of each content block   content_block_start
                        content_block_delta of its text, thinking or input
                        content_block_stop
message_delta           with the stop_reason and the usage
message_stop
"""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.door.gateway.anthropic import errors
from inflight.door.gateway.anthropic.result import MessageResponse, content_of
from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai.blocks import Begun, Block, Change, Grown, Kind
from inflight.door.gateway.problem import Problem

_encode = msgspec.json.encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
# The delta of a kind of block: its type, and the name of the text.
_DELTAS = {
    Kind.TEXT: (b"text_delta", b"text"),
    Kind.REASONING: (b"thinking_delta", b"thinking"),
    Kind.CALL: (b"input_json_delta", b"partial_json"),
}


class MessageEvents:
    """Writes the events."""

    def __init__(self, response: MessageResponse) -> None:
        self._response = response
        self._has_begun = False
        self._delta_head = b""

    def feed(self, deltas: list[Delta]) -> bytes:
        response = self._response
        parts = []
        if not self._has_begun:
            self._has_begun = True
            response.usage.add([msgspec.structs.replace(deltas[0], num_output_tokens=0)])
            parts = [_event("message_start", {"message": response.members()}), _PING]
        response.usage.add(deltas)
        for delta in deltas:
            parts += [self._of_change(change) for change in response.advance(delta)]
        return b"".join(parts)

    def finish(self) -> bytes:
        response = self._response
        members = {"delta": response.ending(), "usage": response.counts()}
        return _event("message_delta", members) + _STOP

    def error(self, problem: Problem) -> bytes:
        return errors.event_of(problem)

    def _of_change(self, change: Change) -> bytes:
        block = change.block
        if isinstance(change, Grown):
            return b"%s%s}}\n\n" % (self._delta_head, _encode(change.text))
        if isinstance(change, Begun):
            self._delta_head = _delta_head(block)
            members = {"index": block.index, "content_block": content_of(block, is_new=True)}
            return _event("content_block_start", members)
        return _event("content_block_stop", {"index": block.index})


def _delta_head(block: Block) -> bytes:
    """Of the events with its text, up to the text."""
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
        b'"delta":{"type":"%s","%s":' % (block.index, *_DELTAS[block.kind])
    )


def _event(kind: str, members: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode({"type": kind, **members}))
