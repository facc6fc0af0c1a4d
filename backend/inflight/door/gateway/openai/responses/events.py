"""The events of a streamed response, in the order that OpenAI's clients rely on.

response.created, response.in_progress
of each item    response.output_item.added
                response.content_part.added     of a message or reasoning
                the deltas of its text or arguments
                response.output_text.done, response.reasoning_text.done or
                response.function_call_arguments.done
                response.content_part.done      of a message or reasoning
                response.output_item.done
response.completed, response.incomplete or response.failed
"""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai.blocks import Begun, Block, Change, Grown, Kind
from inflight.door.gateway.openai.responses.result import Response, id_of, item_of, part_of
from inflight.door.gateway.problem import Problem

_encode = msgspec.json.encode
_TEXTS = {
    Kind.TEXT: "response.output_text",
    Kind.REASONING: "response.reasoning_text",
    Kind.CALL: "response.function_call_arguments",
}


class ResponseEvents:
    """Writes the events."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._num_events = 0
        self._delta_head = b""

    def feed(self, deltas: list[Delta]) -> bytes:
        response = self._response
        parts = self._begin()
        response.usage.add(deltas)
        for delta in deltas:
            for change in response.blocks.feed(delta):
                parts += self._of_change(change)
        return b"".join(parts)

    def finish(self) -> bytes:
        found = self._response
        return self._event(f"response.{found.status}", {"response": found.members()})

    def error(self, problem: Problem) -> bytes:
        members = {"response": self._response.members(problem)}
        return b"".join([*self._begin(), self._event("response.failed", members)])

    def _begin(self) -> list[bytes]:
        if self._num_events:
            return []
        members = {"response": self._response.members()}
        return [self._event(f"response.{one}", members) for one in ("created", "in_progress")]

    def _of_change(self, change: Change) -> list[bytes]:
        block = change.block
        if isinstance(change, Grown):
            if change.logprobs:
                members = {"delta": change.text, "logprobs": change.logprobs}
                return [self._event(f"{_TEXTS[block.kind]}.delta", {**_place(block), **members})]
            number = self._num_events
            self._num_events += 1
            return [b'%s%d,"delta":%s}\n\n' % (self._delta_head, number, _encode(change.text))]
        if isinstance(change, Begun):
            return self._begin_item(block)
        return self._end_item(block)

    def _begin_item(self, block: Block) -> list[bytes]:
        place = _place(block)
        kind = f"{_TEXTS[block.kind]}.delta"
        members = {"type": kind, **place, **_logprobs(block, [])}
        self._delta_head = b"event: %s\ndata: %s" % (
            kind.encode(),
            _encode(members)[:-1] + b',"sequence_number":',
        )
        added = {"output_index": block.index, "item": item_of(block, is_new=True)}
        parts = [self._event("response.output_item.added", added)]
        if block.kind is not Kind.CALL:
            part = {**place, "part": part_of(block, is_new=True)}
            parts.append(self._event("response.content_part.added", part))
        return parts

    def _end_item(self, block: Block) -> list[bytes]:
        place, text = _place(block), block.text
        done = {"output_index": block.index, "item": item_of(block)}
        kind = f"{_TEXTS[block.kind]}.done"
        if block.kind is Kind.CALL:
            members = {**place, "name": block.name, "arguments": text}
            parts = [self._event(kind, members)]
        else:
            parts = [
                self._event(kind, {**place, "text": text, **_logprobs(block, block.logprobs)}),
                self._event("response.content_part.done", {**place, "part": part_of(block)}),
            ]
        return [*parts, self._event("response.output_item.done", done)]

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode(data))


def _place(block: Block) -> dict[str, Any]:
    place: dict[str, Any] = {"item_id": id_of(block), "output_index": block.index}
    return place if block.kind is Kind.CALL else {**place, "content_index": 0}


def _logprobs(block: Block, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"logprobs": found} if block.kind is Kind.TEXT else {}
