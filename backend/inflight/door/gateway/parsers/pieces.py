"""What the output of a model consists of: content, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between the tags of a reasoning model."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call.

    Attributes:
        index: 0 for an output's first call, then 1, 2, ...
        name: of the function, whole.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call that began last.

    Attributes:
        index: of the call.
        text: the parts of a call concatenate to its arguments, a JSON object.
    """

    index: int
    text: str


Piece = Text | Reasoning | CallBegun | CallArguments


class OutputParser(Protocol):
    """Splits an output into pieces while it is generated."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after the next part of the output."""
        ...

    def finish(self) -> list[Piece]:
        """The remaining pieces. An incomplete marker, or a call that has not begun, is Text."""
        ...
