"""The response of a chat, streamed and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from inflight.door.gateway import logprobs
from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai import errors
from inflight.door.gateway.openai.chunks import DONE, Identity, UsageChunks, usage_of
from inflight.door.gateway.openai.logprobs import chat_logprobs
from inflight.door.gateway.parsers import CallBegun, Piece, Reasoning, Text
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.turns import Turn
from inflight.door.gateway.usage import Usage

_encode = msgspec.json.encode
_ROLE = b'{"role":"assistant","content":""}'


@dataclass(frozen=True, slots=True)
class Shape:
    """What a response is made of.

    Attributes:
        model: the id of the model.
        turns: one for each output.
        num_logprobs: how many of the most probable tokens are reported; None for no report.
        reasons: outputs may have reasoning,
        shows_reasoning: which the response has.
    """

    model: str
    turns: Sequence[Turn]
    num_logprobs: int | None = None
    reasons: bool = False
    shows_reasoning: bool = True

    def num_reasoning_tokens(self) -> int | None:
        """Of all outputs; None for a model that does not reason."""
        if not self.reasons:
            return None
        return sum(turn.num_reasoning_tokens for turn in self.turns)


class ChatEvents:
    """The chunks of a streamed chat.

    Args:
        includes_usage: the last chunk has the usage,
        continues_usage: and each other one, too.
    """

    def __init__(self, shape: Shape, includes_usage: bool, continues_usage: bool) -> None:
        self._shape = shape
        self._identity = Identity("chatcmpl", "chat.completion.chunk", shape.model)
        self._usage = UsageChunks(len(shape.turns), includes_usage, continues_usage)
        head = self._identity.head
        self._heads = [b'%s{"index":%d,"delta":' % (head, i) for i in range(len(shape.turns))]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in shape.turns]
        self._has_begun = False

    def feed(self, deltas: list[Delta]) -> bytes:
        parts = []
        if not self._has_begun:
            self._has_begun = True
            self._usage.begin(deltas[0])
            # The choices begin in the order of their indices, which clients' libraries rely on.
            parts = [self._chunk(index, _ROLE) for index in range(len(self._heads))]
        for delta in deltas:
            self._usage.add(delta)
            index = delta.index
            turn = self._shape.turns[index]
            if delta.logprobs:
                places = logprobs.read(delta.logprobs)
                self._logprobs[index] += chat_logprobs(places, self._shape.num_logprobs or 0)
            for piece in turn.feed(delta):
                member = self._member(turn, piece)
                if member:
                    parts.append(self._chunk(index, member))
            if turn.finish_reason:
                parts.append(self._chunk(index, b"{}", b'"%s"' % turn.finish_reason.encode()))
        return b"".join(parts)

    def finish(self) -> bytes:
        num_reasoning_tokens = self._shape.num_reasoning_tokens()
        return self._usage.last(self._identity, num_reasoning_tokens) + DONE

    def error(self, problem: Problem) -> bytes:
        return errors.event_of(problem)

    def _member(self, turn: Turn, piece: Piece) -> bytes:
        """The delta of a piece, as JSON; empty for none."""
        if isinstance(piece, Text):
            return b'{"content":%s}' % _encode(piece.text)
        if isinstance(piece, Reasoning):
            if not self._shape.shows_reasoning:
                return b""
            text = _encode(piece.text)
            return b'{"reasoning_content":%s,"reasoning":%s}' % (text, text)
        if isinstance(piece, CallBegun):
            function = {"name": piece.name, "arguments": ""}
            call = {"id": turn.call_ids[piece.index], "type": "function", "function": function}
        else:
            call = {"function": {"arguments": piece.text}}
        return _encode({"tool_calls": [{"index": piece.index, **call}]})

    def _chunk(self, index: int, delta: bytes, finish_reason: bytes = b"null") -> bytes:
        found = b"null"
        if self._logprobs[index]:  # of all tokens since the last chunk
            found = _encode({"content": self._logprobs[index], "refusal": None})
            self._logprobs[index] = []
        return b'%s%s,"logprobs":%s,"finish_reason":%s}%s' % (
            self._heads[index],
            delta,
            found,
            finish_reason,
            self._usage.closing,
        )


class ChatResult:
    """A chat that is complete."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._identity = Identity("chatcmpl", "chat.completion", shape.model)
        self._usage = Usage(len(shape.turns))
        self._messages = [_Message() for _ in shape.turns]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in shape.turns]

    def feed(self, deltas: list[Delta]) -> None:
        self._usage.add(deltas)
        for delta in deltas:
            self._messages[delta.index].add(self._shape.turns[delta.index].feed(delta))
            if delta.logprobs:
                places = logprobs.read(delta.logprobs)
                found = chat_logprobs(places, self._shape.num_logprobs or 0)
                self._logprobs[delta.index] += found

    def result(self) -> bytes:
        choices = [self._choice(index) for index in range(len(self._messages))]
        usage = usage_of(self._usage, self._shape.num_reasoning_tokens())
        return _encode({**self._identity.members, "choices": choices, "usage": usage})

    def _choice(self, index: int) -> dict[str, Any]:
        has_logprobs = self._shape.num_logprobs is not None
        found = {"content": self._logprobs[index], "refusal": None} if has_logprobs else None
        turn = self._shape.turns[index]
        message = self._messages[index].members(turn, self._shape.shows_reasoning)
        return {
            "index": index,
            "message": message,
            "logprobs": found,
            "finish_reason": turn.finish_reason,
        }


class _Message:
    """The message of an output, from its pieces."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                self._content.append(piece.text)
            elif isinstance(piece, Reasoning):
                self._reasoning.append(piece.text)
            elif isinstance(piece, CallBegun):
                self._calls.append((piece.name, []))
            else:
                self._calls[piece.index][1].append(piece.text)

    def members(self, turn: Turn, shows_reasoning: bool) -> dict[str, Any]:
        content = "".join(self._content)
        # null, not an empty string, beside calls alone.
        found: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self._reasoning and shows_reasoning:
            found["reasoning_content"] = found["reasoning"] = "".join(self._reasoning)
        if self._calls:
            found["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": function, "arguments": "".join(arguments)},
                }
                for name, (function, arguments) in zip(turn.call_ids, self._calls, strict=True)
            ]
        return found
