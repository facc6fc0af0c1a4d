"""An output as a sequence of blocks, one open at a time: texts, reasoning and calls."""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass, field
from typing import Any

from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai.logprobs import by_token
from inflight.door.gateway.parsers import CallBegun, Piece, Reasoning, Text
from inflight.door.gateway.turns import LENGTH, Turn

# The text of a token that is a part of a character.
_PART = "\ufffd"


class Kind(enum.Enum):
    """What a block consists of."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A part of an output that has an id of its own in a response.

    Attributes:
        index: in the output.
        name: of the function; empty for other kinds than calls.
        key: random hex digits, for ids.
        parts: they concatenate to its text, or to the arguments of a call.
        logprobs: OpenAI's objects, of the tokens of a text if they are reported.
        is_complete: false if it was cut off by max_tokens, and until it ends.
    """

    kind: Kind
    index: int
    name: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    parts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Begun:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """Attributes:
    text: new, never empty.
    logprobs: of its tokens.
    """

    block: Block
    text: str
    logprobs: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ended:
    block: Block


Change = Begun | Grown | Ended


class Blocks:
    """The blocks of an output while it is generated. White space between other blocks is no block.

    Args:
        turn: the output.
        shows_reasoning: whether reasoning is a block, or left out.
        num_logprobs: how many of the most probable tokens are reported; None for no report.

    Attributes:
        all: up to now; the last one may be open.
    """

    def __init__(
        self, turn: Turn, shows_reasoning: bool = True, num_logprobs: int | None = None
    ) -> None:
        self._turn = turn
        self._shows_reasoning = shows_reasoning
        self._num_logprobs = num_logprobs
        self._logprobs: list[dict[str, Any]] = []  # of tokens that are in no block yet
        self._open: Block | None = None
        self._space = ""
        self.all: list[Block] = []

    def feed(self, delta: Delta) -> list[Change]:
        """What the next delta changes; the last one ends the open block."""
        changes: list[Change] = []
        if self._num_logprobs is None or not delta.logprobs:
            self._feed(delta, changes)
            return changes
        for part, found in by_token(delta, self._num_logprobs):
            self._logprobs += found
            self._feed(part, changes)
        return changes

    def _feed(self, delta: Delta, changes: list[Change]) -> None:
        for piece in self._turn.feed(delta):
            self._add(piece, changes)
        if self._turn.finish_reason:
            if self._space and not self.all:
                self._grow(Kind.TEXT, self._space, changes)
            if self._open is not None and self._open.kind is Kind.TEXT:
                self._open.logprobs += self._logprobs  # of tokens without text, such as the last
            self._end(changes, self._turn.finish_reason != LENGTH)

    def _add(self, piece: Piece, changes: list[Change]) -> None:
        if isinstance(piece, Text):
            is_open = self._open is not None and self._open.kind is Kind.TEXT
            if not is_open and (not piece.text or piece.text.isspace()):
                self._space += piece.text
                return
            self._grow(Kind.TEXT, self._space + piece.text, changes)
            self._space = ""
        elif isinstance(piece, Reasoning):
            if self._shows_reasoning:
                self._grow(Kind.REASONING, piece.text, changes)
            self._logprobs = []
        elif isinstance(piece, CallBegun):
            self._begin(Kind.CALL, changes, piece.name)
        else:
            self._grow(Kind.CALL, piece.text, changes)

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        block = self._open
        if block is None or block.kind is not kind:
            if self.all:
                self._logprobs = _covering(self._logprobs, text)
            block = self._begin(kind, changes)
        if text:
            found = self._logprobs if kind is Kind.TEXT else []
            self._logprobs = []
            block.parts.append(text)
            block.logprobs += found
            changes.append(Grown(block, text, found))

    def _begin(self, kind: Kind, changes: list[Change], name: str = "") -> Block:
        self._end(changes)
        self._space = ""
        block = self._open = Block(kind, len(self.all), name)
        self.all.append(block)
        changes.append(Begun(block))
        return block

    def _end(self, changes: list[Change], is_complete: bool = True) -> None:
        if self._open is not None:
            self._open.is_complete = is_complete
            changes.append(Ended(self._open))
            self._open = None


def _covering(logprobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Of the last tokens, as many as have the length of the text: what precedes them has ended
    another block."""
    place, length = len(logprobs), 0
    while place and (length < len(text) or logprobs[place - 1]["token"] == _PART):
        place -= 1
        length += len(logprobs[place]["token"])
    return logprobs[place:]
